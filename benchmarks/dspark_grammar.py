"""What masks on drafts do to acceptance under a JSON schema, on the trained pair: masked, unmasked and no drafts.

One engine after the other, each in a process of its own and on one core. Exits 1 when answers differ or fewer drafts
stand with masks than without.

Example: python benchmarks/dspark_grammar.py --quick
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from child import Child, answer
from facts import ROOT, facts, keep

DRAFTS = 5
MODES = {"none": "no drafts", "unmasked": "drafts", "masked": "masked drafts"}
RECORD = {"city": {"type": "string", "maxLength": 12}, "price": {"type": "integer"}, "high": {"type": "boolean"}}
COLOURS = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 4}
OTHER = {"identifier": {"type": "integer"}, "kind": {"enum": ["alpha", "beta", "gamma"]}, "tags": COLOURS}
CASES: dict[str, tuple[str, dict[str, Any] | None]] = {
    "none": ("records", None),
    "as the text": ("records", RECORD),
    "unlike the text": ("records", OTHER),
    "unlike prose": ("prose", OTHER),
}
"""By the schema: the prompts, and the properties that the answer must have."""


def main() -> None:
    """Measure, write the results, print the page."""
    args = _arguments()
    if args.serve:
        serve(*args.serve)
        return
    from deepinfer_vllm.training.shipped import write_trained

    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = write_trained(Path(scratch) / "pair", dtype="float32").directory
        found = {mode: answers(mode, checkpoint, args) for mode in MODES}
    rows = [row(name, {mode: found[mode][name] for mode in MODES}) for name in CASES]
    results = {**facts("" if sys.argv[1:] else "make bench-dspark"), "prompts": args.prompts, "results": rows}
    print(keep(results, args.out, "dspark_grammar", text(results)).read_text())
    stands = all(row["accepted"]["masked"] >= row["accepted"]["unmasked"] for row in rows)
    sys.exit(not (stands and all(row["same"] for row in rows)))


def answers(mode: str, checkpoint: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What an engine answers in each case, and what it took: see `serve`."""
    from deepinfer_vllm.training.prompts import held_out_prompts

    engine, found = start(mode, checkpoint), {}
    try:
        engine.ready()
        for name, (workload, properties) in CASES.items():
            prompts = held_out_prompts(args.prompts, workloads=(workload,), tokens=96)
            schema = properties and {"type": "object", "properties": properties, "required": list(properties)}
            asked = {"prompts": [prompt["prompt"] for prompt in prompts], "schema": schema, "tokens": args.tokens}
            for _ in range(2):  # grammars are compiled in the first
                found[name] = json.loads(engine.ask(json.dumps(asked)))
            print(f"[{time.strftime('%H:%M:%S')}] {MODES[mode]}, schema {name}", file=sys.stderr, flush=True)
    finally:
        engine.close()
    return found


def start(mode: str, checkpoint: Path) -> Child:
    """An engine that verifies every draft, so that what stands does not depend on the clock."""
    environment = {
        "DEEPINFER_VLLM_MODEL": "portable",
        "DEEPINFER_VLLM_DECODER_REPLAY": "0",
        "DEEPINFER_VLLM_DSPARK_BUDGET": "fixed",
        "DEEPINFER_VLLM_DSPARK_GRAMMAR": str(int(mode == "masked")),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return Child([__file__, "--serve", mode, str(checkpoint)], environment)


def serve(mode: str, checkpoint: str) -> None:
    """In the engine's process: answer {"prompts": texts, "schema": or null, "tokens": most} with what it took."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    from drafting.engine import counts
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    drafting = {} if mode == "none" else {"speculative_config": {"method": "dspark", "num_speculative_tokens": DRAFTS}}
    sizes = {"kv_cache_memory_bytes": 256 << 20, "block_size": 32, "max_num_seqs": 16, "max_model_len": 1024}
    more = {"enforce_eager": True, "disable_log_stats": False, "enable_prefix_caching": False}
    llm = LLM(checkpoint, dtype="float32", **sizes, **more, **drafting)
    answer()
    for line in sys.stdin:
        asked = json.loads(line)
        outputs = StructuredOutputsParams(json=asked["schema"]) if asked["schema"] else None
        params = SamplingParams(temperature=0, max_tokens=asked["tokens"], structured_outputs=outputs)
        before, clock = counts(llm), time.process_time()
        found = llm.generate(asked["prompts"], params, use_tqdm=False)
        seconds, after = time.process_time() - clock, counts(llm)
        answers = [list(output.outputs[0].token_ids) for output in found]
        steps = after.get("verifications", 0) - before.get("verifications", 0)
        answer(json.dumps({"answers": answers, "seconds": seconds, "steps": steps}))


def row(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """A case's accepted length, tokens a request gets in a step, and tokens a second of processor time, by mode."""
    tokens = sum(map(len, found["none"]["answers"]))
    return {
        "schema": name,
        "workload": CASES[name][0],
        "tokens": tokens,
        "same": all(found[mode]["answers"] == found["none"]["answers"] for mode in MODES),
        "accepted": {mode: tokens / found[mode]["steps"] for mode in ("unmasked", "masked")},
        "tokens_a_second": {mode: tokens / found[mode]["seconds"] for mode in MODES},
    }


def text(results: dict[str, Any]) -> str:
    """The page."""
    machine = results["machine"]
    return "\n".join(
        [
            "# Drafts under a grammar",
            "",
            f"`{results['command']}`, commit {results['commit']}, {results['date']}; {machine['cpu']}, one thread; "
            f"vLLM {machine['vllm']}, float32, the trained pair, {DRAFTS} drafts, all verified, {results['prompts']} "
            "requests at once. Accepted: tokens a request gets in a step, the sampled one with them. Speed: tokens of "
            "all requests a second of processor time.",
            "",
            "| schema | accepted unmasked | accepted masked | speed without drafts | unmasked | masked | same |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *(
                f"| {row['schema']} | {row['accepted']['unmasked']:.2f} | {row['accepted']['masked']:.2f} | "
                + " | ".join(f"{row['tokens_a_second'][mode]:.0f}" for mode in MODES)
                + f" | {'yes' if row['same'] else 'no'} |"
                for row in results["results"]
            ),
            "",
        ]
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="four prompts; for a look, not for a record")
    add("--prompts", type=int, default=16, help="of every case, at once")
    add("--tokens", type=int, default=96, help="of each answer, at most")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results", help="for dspark_grammar.json and .md")
    add("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.prompts = 4
    for option, most in (("prompts", 16), ("tokens", 512)):
        if not 1 <= getattr(args, option) <= most:
            parser.error(f"--{option} {getattr(args, option)}: must lie in 1..{most}")
    return args


if __name__ == "__main__":
    main()
