"""Tokens a second of a real CPU engine with DSpark and without, on the trained pair: budget, five drafts, none.

Each has an engine in a process of its own, on one core, and they take turns on the same prompts, so that what else the
machine does meets all of them. Exits 1 when a must is missed.

Example: python benchmarks/dspark.py --quick
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from facts import ROOT, facts

MODES = ("none", "fixed", "auto")
PROMPT_TOKENS, MOST_TOKENS = 64, 1024


def main() -> None:
    """Measure, write the results, print the page."""
    args = _arguments()
    if args.serve:
        from drafting.engine import serve

        mode, checkpoint, batch, tokens = args.serve
        serve(mode, checkpoint, int(batch), int(tokens))
        return
    from drafting.engine import start
    from drafting.report import write
    from drafting.rounds import summary, take_turns

    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = args.checkpoint or _trained(Path(scratch) / "pair")
        name = str(args.checkpoint) if args.checkpoint else "the trained pair"
        results = {
            **facts("" if sys.argv[1:] else "make bench-dspark"),
            "checkpoint": name,
            "rounds": args.rounds,
            "tokens": args.tokens,
            "results": [],
        }
        engines = {mode: start(__file__, mode, checkpoint, max(args.batch), MOST_TOKENS) for mode in MODES}
        try:
            for engine in engines.values():
                engine.ready()
            for batch in args.batch:
                prompts = _prompts(checkpoint, max(args.prompts, 3 * batch))
                tallies = take_turns(engines, prompts, batch, args.tokens, args.rounds, _say)
                results["results"] += summary(tallies, batch, len(prompts) * args.tokens)
        finally:
            for engine in engines.values():
                engine.close()
    page = write(results, args.out, "dspark-quick" if args.quick else "dspark")
    print(page.read_text())
    sys.exit(any(limit["verdict"] == "missed" for limit in results["limits"]))


def _trained(directory: Path) -> Path:
    from deepinfer_vllm.training.shipped import write_trained

    return write_trained(directory, dtype="float32").directory


def _prompts(checkpoint: Path, count: int) -> list:
    """Held-out prompts, kinds of text in turn."""
    from drafting.rounds import Prompt
    from tokenizers import Tokenizer

    from deepinfer_vllm.training.prompts import held_out_prompts

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    made = held_out_prompts(count, tokens=PROMPT_TOKENS)
    return [Prompt(prompt["workload"], tokenizer.encode(prompt["prompt"]).ids) for prompt in made]


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="one short round of the smallest batches; for a look, not for a record")
    add("--batch", type=int, nargs="+", help="requests at a time; default: 1 4 16 32")
    add("--rounds", type=int, help="of every size, after one that warms up; default: 5")
    add("--tokens", type=int, help="of each answer; default: 128")
    add("--prompts", type=int, help="in each round, at least, and three times the size; default: 12")
    add("--checkpoint", type=Path, metavar="DIR", help="with draft layers; default: the trained pair")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results", help="for dspark.json, .md and .svg")
    add("--serve", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    usual = ([1, 4], 1, 16, 4) if args.quick else ([1, 4, 16, 32], 5, 128, 12)
    for option, value in zip(("batch", "rounds", "tokens", "prompts"), usual, strict=True):
        if getattr(args, option) is None:
            setattr(args, option, value)
    for option, value, most in (
        *(("batch", batch, 256) for batch in args.batch),
        ("rounds", args.rounds, 1000),
        ("tokens", args.tokens, MOST_TOKENS - 2 * PROMPT_TOKENS),
        ("prompts", args.prompts, 1000),
    ):
        if not 1 <= value <= most:
            parser.error(f"--{option} {value}: must lie in 1..{most}")
    if args.checkpoint and not (args.checkpoint / "config.json").is_file():
        parser.error(f"--checkpoint {args.checkpoint}: has no config.json; name a checkpoint's directory")
    return args


if __name__ == "__main__":
    main()
