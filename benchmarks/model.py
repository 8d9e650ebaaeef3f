"""Speed of the V4.1 model on this machine, beside what the machine could do at best.

Example: python benchmarks/model.py --quick
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from facts import ROOT, facts

from deepinfer_vllm.checkpoint.presets import PRESETS

START = """
import time
from vllm import LLM
if __name__ == "__main__":
    llm = LLM({directory!r}, enforce_eager=True, tokenizer_mode="deepseek_v41", kv_cache_memory_bytes=1 << 28)
    print("ready", time.time())
"""


def main() -> None:
    """Measure, write the results, print the page; exit code 1 when a must is missed."""
    args = _arguments()
    if args.part:
        _run_part(args)
        return
    from v41.measure import FULL, QUICK, say

    from deepinfer_vllm.checkpoint.create import create

    tokens, most = (QUICK if args.quick else FULL).max_tokens, PRESETS[args.preset].max_position_embeddings
    if tokens > most:
        sys.exit(f"model.py: {tokens} tokens do not fit the {most} positions of --preset {args.preset}: add --quick")
    checkpoint = args.checkpoints / args.preset
    if not (checkpoint / "model.safetensors.index.json").is_file():
        say(f"writing the {args.preset} preset to {checkpoint}")
        create(checkpoint, name=args.preset, force=True)
    results = {**facts("" if sys.argv[1:] else "make bench-model"), "preset": args.preset}
    with tempfile.TemporaryDirectory() as scratch:
        say("engine start on the tiny preset")
        results["start"] = {"seconds": _start_seconds(Path(scratch))}
        for dtype in args.dtype:
            part = Path(scratch) / f"{dtype}.json"
            command = [sys.executable, __file__, *sys.argv[1:], "--part", dtype, str(checkpoint), str(part)]
            subprocess.run(command, check=True)
            results[dtype] = json.loads(part.read_text())
    from v41.report import write

    page = write(results, args.out, "model-quick" if args.quick else "model")
    print(page.read_text())
    say(f"written: {page}")
    sys.exit(any(limit["verdict"] == "missed" for limit in results["limits"]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter prompts, one round; for a look, not for a record")
    parser.add_argument("--preset", default="mid", choices=PRESETS, help="size of the model; default: mid")
    both = ["float32", "bfloat16"]
    parser.add_argument("--dtype", nargs="+", default=both, choices=both, help="default: both")
    parser.add_argument("--checkpoints", type=Path, default=ROOT / "build" / "bench", help="where presets are written")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="for model.json and model.md")
    parser.add_argument("--part", nargs=3, metavar=("DTYPE", "CHECKPOINT", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "float32" not in args.dtype:
        parser.error("--dtype must name float32, which the limits are about")
    return args


def _run_part(args: argparse.Namespace) -> None:
    """One dtype, in a process of its own so that its memory is given back."""
    from v41.measure import BF16, FULL, QUICK, measure

    dtype, checkpoint, file = args.part
    plan = QUICK if args.quick else FULL if dtype == "float32" else BF16
    config = json.loads((Path(checkpoint) / "config.json").read_text())
    Path(file).write_text(json.dumps(measure(Path(checkpoint), config, dtype, plan)))


def _start_seconds(scratch: Path) -> float:
    """From the start of a Python process to an engine of the tiny preset that is ready, in its own process as vLLM has
    it. The first start on a machine also reads the packages from disk, so the second is taken."""
    from deepinfer_vllm.checkpoint.create import create

    create(scratch / "tiny")
    script = scratch / "start.py"
    script.write_text(START.format(directory=str(scratch / "tiny")))
    for _ in range(2):
        begin = time.time()
        done = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True)
        ready = float(next(line for line in done.stdout.splitlines() if line.startswith("ready")).split()[1])
    return ready - begin


if __name__ == "__main__":
    main()
