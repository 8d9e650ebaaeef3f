"""Runs probe_child.py in the environment's interpreter: a crash of vLLM or torch is then a row, not our end."""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_CHILD = Path(__file__).with_name("probe_child.py")
TIMEOUT_SECONDS = 180
VLLM_STAGES = ("import vllm", "from vllm import LLM", "platform", "runner", "plugins", "model")


@dataclass(frozen=True)
class Outcome:
    """How one stage of a probe ended; `text` is its answer, or its error in one line."""

    ok: bool
    text: str


def import_modules(python: str, modules: Sequence[str]) -> dict[str, Outcome]:
    """Import each module in one subprocess."""
    return _run(python, ["import", *modules], modules) if modules else {}


def probe_vllm(python: str) -> dict[str, Outcome]:
    """What vLLM resolves here, by stage: see VLLM_STAGES."""
    return _run(python, ["vllm"], VLLM_STAGES)


def _run(python: str, arguments: Sequence[str], stages: Sequence[str]) -> dict[str, Outcome]:
    environ = os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    # -P: a directory called vllm where the user stands must not be taken for the installed package.
    command = [python, "-P", str(_CHILD), *arguments]
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
        output, end = done.stdout, f"the probe ended with exit code {done.returncode} before it"
    except subprocess.TimeoutExpired as expired:
        raw = expired.stdout or b""
        output = raw.decode() if isinstance(raw, bytes) else raw
        end = f"the probe gave no answer within {TIMEOUT_SECONDS} s"
    answers = [json.loads(line) for line in output.splitlines()]
    outcomes = {answer["stage"]: Outcome(answer["ok"], answer["text"]) for answer in answers}
    return {stage: outcomes.get(stage, Outcome(False, end)) for stage in stages}
