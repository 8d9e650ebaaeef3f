"""What the benchmarks say to who calls them; what they measure is in their own tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = [
    "ascend_platform.py",
    "ascend_ops.py",
    "chunking.py",
    "chunking_decision.py",
    "determinism.py",
    "dspark_budget.py",
    "dspark.py",
    "dspark_grammar.py",
    "eplb.py",
    "kvstore.py",
    "kvstore_ec.py",
    "kvstore_engine.py",
    "load_memory.py",
    "model.py",
    "router.py",
    "router_policies.py",
    "runner_v2.py",
]


def call(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, f"benchmarks/{script}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_has_an_example(script: str) -> None:
    done = call(script, "--help")
    assert done.returncode == 0 and f"Example: python benchmarks/{script}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ascend_platform.py", "/no/such/directory"], "has no vllm_ascend/platform.py; `make ascend` installs one"),
        (["ascend_ops.py", "--wheel", "/no/such/file"], "--wheel /no/such/file: no such file"),
        (["chunking.py", "--sizes", "8"], "--sizes 8: must lie in 16..2048"),
        (["chunking_decision.py", "--requests", "0"], "--requests 0: must lie in 1..4096"),
        (["model.py", "--preset", "huge"], "invalid choice: 'huge'"),
        (["model.py", "--preset", "tiny"], "do not fit the 8192 positions of --preset tiny: add --quick"),
        (["model.py", "--dtype", "bfloat16"], "must name float32"),
        (["determinism.py", "--rounds", "0"], "--rounds 0: must be at least 1"),
        (["runner_v2.py", "--rounds", "0"], "--rounds 0: must be at least 1"),
        (["dspark.py", "--batch", "1", "0"], "--batch 0: must lie in 1..256"),
        (["dspark.py", "--tokens", "2000"], "--tokens 2000: must lie in 1..896"),
        (["dspark.py", "--checkpoint", "/no/such/directory"], "has no config.json"),
        (["dspark_grammar.py", "--prompts", "17"], "--prompts 17: must lie in 1..16"),
        (["kvstore.py", "--sessions", "0"], "--sessions 0: must be at least 1"),
        (["kvstore.py", "--rounds", "9"], "4974 MiB on disk, at most 2048: take fewer --rounds or --blocks"),
        (["kvstore_ec.py", "--rounds", "1"], "--rounds 1: must be at least 2"),
        (["kvstore_ec.py", "--directory", "/no/such/directory"], "no such directory"),
        (["kvstore_engine.py", "--preset", "tiny"], "8264 tokens do not fit the 8192 positions of --preset tiny"),
        (["kvstore_engine.py", "--decode-tokens", "1"], "--decode-tokens 1: must be at least 2"),
        (["dspark_budget.py", "--seeds", "0"], "--seeds 0: must be at least 1"),
        (["router.py", "--rounds", "0"], "--rounds 0: must be at least 1"),
        (["router.py", "--vllm-router", "/no/such/program"], "no such file"),
        (["router_policies.py", "--seconds", "60"], "--seconds 60: must be at least 120"),
        (["load_memory.py", "--scratch", "/no/such/directory"], "no such directory"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(arguments: list[str], said: str) -> None:
    done = call(*arguments)
    assert done.returncode != 0 and said in done.stderr and "Traceback" not in done.stderr


def test_a_record_says_how_it_was_taken() -> None:
    program = "import json, sys; sys.path.append('benchmarks'); from facts import facts; print(json.dumps(facts('x')))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["command"] == "x" and found["commit"] and found["machine"]["torch"] and found["machine"]["vllm"]
