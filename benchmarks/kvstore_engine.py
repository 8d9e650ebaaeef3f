"""What the store gives and takes inside vLLM's engine on a CPU: time to first token, and time per token after it.

Time to first token: a prompt whose first part is in the store, in an engine that has just started, beside the same
prompt in an engine without the store that has just started too. Decode: one engine, whose connector stores what is
computed and stores nothing in turn. Exits 1 when a limit is not met.

Example: python benchmarks/kvstore_engine.py --preset tiny --shared 4096 --rounds 1 --decode-rounds 2
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from facts import ROOT, facts

from deepinfer_vllm.checkpoint.presets import PRESETS


def main() -> None:
    """Measure, write the results, print the page."""
    args = _arguments()
    if args.serve:
        from kv.engine import serve

        serve(*args.serve)
        return
    from kv import engine_report, engine_rounds

    from deepinfer_vllm.checkpoint.create import create

    checkpoint = args.checkpoints / args.preset
    if not (checkpoint / "model.safetensors.index.json").is_file():
        engine_rounds.say(f"writing the {args.preset} preset to {checkpoint}")
        create(checkpoint, name=args.preset, force=True)
    sizes = ("shared", "tail", "rounds", "decode_prompt", "decode_tokens", "decode_rounds")
    plan = engine_rounds.Plan(*(getattr(args, name) for name in sizes))
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="kvstore-engine-") as scratch:
        measured = engine_rounds.measure(checkpoint, Path(scratch), plan)
    about = facts("" if sys.argv[1:] else "make bench-kvstore")
    page = engine_report.write({**about, "preset": args.preset, **measured}, args.out)
    print(page.read_text())
    sys.exit("not met" in page.read_text())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--preset", default="mid", choices=PRESETS, help="size of the model; default: mid")
    add("--shared", type=int, default=8192, help="tokens that are in the store; default: 8192")
    add("--tail", type=int, default=64, help="tokens of the same prompt that are not; default: 64")
    add("--rounds", type=int, default=3, help="of the first token, two fresh engines each; default: 3")
    add("--decode-prompt", type=int, default=512, help="tokens before those that are timed; default: 512")
    add("--decode-tokens", type=int, default=16, help="tokens that are timed; default: 16")
    add("--decode-rounds", type=int, default=20, help="of decoding, after one that warms up; default: 20")
    add("--checkpoints", type=Path, default=ROOT / "build" / "bench", help="where presets are written")
    add("--directory", type=Path, help="where the store goes and is removed again; default: the temporary directory")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results", help="for kvstore_engine.json and .md")
    add("--serve", nargs=3, metavar=("CHECKPOINT", "MAX_TOKENS", "STORE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name in ("shared", "tail", "rounds", "decode_prompt", "decode_rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    if args.decode_tokens < 2:
        parser.error(f"--decode-tokens {args.decode_tokens}: must be at least 2")
    if args.directory and not args.directory.is_dir():
        parser.error(f"--directory {args.directory}: no such directory")
    most = PRESETS[args.preset].max_position_embeddings
    if (tokens := max(args.shared + args.tail, args.decode_prompt + args.decode_tokens) + 8) > most:
        parser.error(
            f"{tokens} tokens do not fit the {most} positions of --preset {args.preset}: take a smaller --shared"
        )
    return args


if __name__ == "__main__":
    main()
