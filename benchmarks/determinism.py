"""What VLLM_BATCH_INVARIANT=1 costs V4.1 on a CPU: its times beside those of the normal mode.

Each mode has a process of its own, and they take turns, round by round, so that what else the machine does meets both.
A cost is the median over the rounds of the mode's time divided by the normal mode's of the same round, by the clock and
by the processor time that was used; one thread computes. Exits 1 when decoding 8 requests in float32 costs more than
1.5.

Example: python benchmarks/determinism.py --quick
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from child import Child, answer
from facts import facts

LIMIT = 1.5
MODES = {
    "normal": {"VLLM_BATCH_INVARIANT": "0"},
    "invariant": {"VLLM_BATCH_INVARIANT": "1"},
    "no compiler": {"VLLM_BATCH_INVARIANT": "1", "DEEPINFER_VLLM_NATIVE": "0"},
}
WORKLOADS = {
    "decode 1": (1, 16, 33),
    "decode 8": (8, 16, 33),
    "decode 8 at 384": (8, 384, 17),
    "prefill 1024": (1, 1024, 1),
}
"""Requests, tokens of each prompt, tokens of each answer. Of "decode" the first token is not counted."""

SLOW, SLOW_WORKLOADS = "no compiler", ("decode 1", "decode 8")
"""One token at a time: nobody would wait for the others."""

PAIRS = [("tiny", "float32", 0), ("tiny", "bfloat16", 0), ("mid", "float32", 5), ("mid", "bfloat16", 5)]
"""Preset, dtype, layers (0: all)."""


def serve(model: str, dtype: str) -> None:
    """In a mode's process: answer each line "requests prompt answer" with seconds of a step's kind, by either time."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype=dtype,
        enforce_eager=True,
        kv_cache_memory_bytes=512 << 20,
        block_size=32,
        max_num_seqs=8,
        max_model_len=2048,
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )

    def spent(prompts: list[Any], tokens: int) -> tuple[float, float]:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        started, used = time.perf_counter(), time.process_time()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - started, time.process_time() - used

    answer()
    for line in sys.stdin:
        requests, prompt, tokens = map(int, line.split())
        prompts = [{"prompt_token_ids": [10 + (7 * i + p) % 350 for p in range(prompt)]} for i in range(requests)]
        whole = spent(prompts, tokens)
        first = spent(prompts, 1) if tokens > 1 else (0.0, 0.0)
        answer(" ".join(str(a - b) for a, b in zip(whole, first, strict=True)))


def start(mode: str, model: Path, dtype: str) -> Child:
    """A mode's process."""
    environment = {
        **MODES[mode],
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "DEEPINFER_VLLM_DECODER_REPLAY": "0",  # as it is in the invariant mode
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }
    child = Child([__file__, "--serve", str(model), dtype], environment)
    child.ready()
    return child


def measure(preset: str, dtype: str, model: Path, modes: list[str], rounds: int) -> list[dict[str, Any]]:
    """Every workload: seconds of all rounds, and what each mode costs."""
    engines = {mode: start(mode, model, dtype) for mode in modes}
    results = []
    for name, shape in WORKLOADS.items():
        compared = [mode for mode in modes if mode != SLOW or name in SLOW_WORKLOADS]
        found: dict[str, list[list[float]]] = {mode: [] for mode in compared}
        for number in range(rounds + 1):  # the first warms up
            for mode in compared:
                seconds = [float(part) for part in engines[mode].ask(" ".join(map(str, shape))).split()]
                if number:
                    found[mode].append(seconds)
        for mode in compared[1:]:
            pairs = list(zip(found["normal"], found[mode], strict=True))
            cost = {
                by: round(statistics.median(b[i] / a[i] for a, b in pairs), 3)
                for i, by in enumerate(("clock", "processor"))
            }
            row = {"preset": preset, "dtype": dtype, "workload": name, "mode": mode, "cost": cost}
            results.append({**row, "seconds": {"normal": found["normal"], mode: found[mode]}})
            print(f"{preset} {dtype}, {name}, {mode}: {cost}", flush=True)
    for engine in engines.values():
        engine.close()
    return results


def main() -> None:
    """Measure, write the results, say what is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of every workload, after one that warms up; default: 3")
    parser.add_argument("--quick", action="store_true", help="the tiny model in float32 only, two rounds")
    out = Path(__file__).parent / "results" / "determinism.json"
    parser.add_argument("--out", type=Path, default=out, help="file for the numbers, as JSON")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: must be at least 1")
    if arguments.serve:
        serve(*arguments.serve)
        return
    from deepinfer_vllm.checkpoint.create import create

    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for preset, dtype, layers in PAIRS[:1] if arguments.quick else PAIRS:
            model = Path(scratch) / preset
            if not model.exists():
                create(model, name=preset, layers=layers or None)
            modes = list(MODES) if (preset, dtype) == ("tiny", "float32") else ["normal", "invariant"]
            results += measure(preset, dtype, model, modes, 2 if arguments.quick else arguments.rounds)
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps({**facts(), "limit": LIMIT, "results": results}, indent=1) + "\n")
    missed = [row for row in results if judged(row) and row["cost"]["processor"] > LIMIT]
    for row in missed:
        print(f"above {LIMIT}: {row['preset']} {row['workload']} {row['cost']['processor']}")
    sys.exit(bool(missed))


def judged(row: dict[str, Any]) -> bool:
    """Whether the limit is for this row."""
    return bool(row["workload"].startswith("decode 8") and row["dtype"] == "float32" and row["mode"] == "invariant")


if __name__ == "__main__":
    main()
