"""Record which experts the mid model's routers choose on made-up texts of six kinds: benchmarks/experts/recorded.npz.

The weights are random, so experts are unequally popular for the reasons that weights and texts give, not because a
training left it so. A row of the trace is one text: its first tokens, one prefill, counted by layer and expert.
Half an hour on two cores, 5 GB of memory, 3 GB of disk.

Example: python benchmarks/experts/record.py --texts 240 --tokens 128
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

RECORDED = Path(__file__).resolve().parent / "recorded.npz"


def main() -> None:
    """Make the checkpoint, run the texts, write the trace."""
    args = _arguments()
    from deepinfer_vllm.checkpoint.create import create
    from deepinfer_vllm.eplb import trace
    from deepinfer_vllm.training.texts import WORKLOADS, text

    kinds = sorted(WORKLOADS)
    chosen = [(kinds[n % len(kinds)], n // len(kinds)) for n in range(args.texts)]
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        create(Path(scratch), name="mid", seed=0)
        counts = _counts(scratch, [text(*one) for one in chosen], args.tokens)
    meta = {
        "model": "mid preset, random weights, seed 0, bfloat16",
        "row": "one text",
        "kinds": [kind for kind, _ in chosen],
        "tokens": args.tokens,
        "top": int(counts[0, 0].sum()) // args.tokens,
    }
    trace.write(args.out, counts, meta)
    print(f"{args.out}: {counts.shape[0]} texts, {counts.shape[1]} layers, {counts.shape[2]} experts")


def _counts(model: str, texts: list[str], tokens: int) -> np.ndarray:
    """[texts, layers, experts]."""
    from vllm import SamplingParams

    from deepinfer_vllm.models.deepseek_v41.router import Router
    from deepinfer_vllm.offline_engine import offline_engine

    seen: list[np.ndarray] = []
    plain = Router.route

    def route(self, x, is_image=None):  # noqa: ANN001, ANN202
        experts, weights = plain(self, x, is_image)
        seen.append(np.bincount(experts.flatten().numpy(), minlength=self.bias.numel()))
        return experts, weights

    made = []
    arguments = {"enable_prefix_caching": False, "max_num_batched_tokens": tokens, "max_model_len": 2 * tokens}
    Router.route = route
    try:
        with offline_engine(model, {"DEEPINFER_VLLM_DECODER_REPLAY": "0"}, **arguments) as llm:
            encode = llm.get_tokenizer().encode
            for number, text in enumerate(texts):
                ids = encode(text)[:tokens]
                if len(ids) < tokens:
                    raise SystemExit(f"record: text {number} has {len(ids)} tokens, not {tokens}; lower --tokens")
                seen.clear()
                llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=1), use_tqdm=False)
                made.append(np.stack(seen))
                print(f"\r{number + 1}/{len(texts)} texts", end="", file=sys.stderr, flush=True)
    finally:
        Router.route = plain
    return np.stack(made)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=240, help="default: 240")
    parser.add_argument("--tokens", type=int, default=128, help="of each text; default: 128")
    parser.add_argument("--out", type=Path, default=RECORDED, help="default: %(default)s")
    parser.add_argument("--scratch", type=Path, help="folder for the checkpoint; default: the system's")
    return parser.parse_args()


if __name__ == "__main__":
    main()
