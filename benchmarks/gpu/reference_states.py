"""The same states as states.py's from the float64 reference of the tests, on the GPU: who is right where two differ.

Example: python benchmarks/gpu/reference_states.py /tmp/wide /tmp/f64.safetensors --tokens 1 128 --qat
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tests"))

from states import ROWS, prompt_of


def main() -> None:
    """Run the prompts and save what was computed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 128], help="lengths of the prompts")
    parser.add_argument("--qat", action="store_true", help="round KV rows and index vectors as in training")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    from reference import load

    reference = load(args.checkpoint)
    torch.set_default_device(args.device)
    target = {name: tensor for name, tensor in reference.weights.items() if not name.startswith("mtp.")}
    reference._cast[torch.float64] = {n: t.to(args.device, torch.float64) for n, t in target.items()}
    kept = {}
    for tokens in args.tokens:
        start = time.monotonic()
        ids = torch.tensor(prompt_of(tokens, reference.config.vocab_size))
        out = reference.forward(ids, qat=args.qat, replay_from=max(0, tokens - reference.config.sliding_window))
        kept[f"{tokens}.aux"] = out.stream_means[1:, -ROWS:].float().cpu().contiguous()
        kept[f"{tokens}.hidden"] = out.hidden_states[-1, -ROWS:].float().cpu().contiguous()
        kept[f"{tokens}.logits"] = out.logits[-ROWS:].float().cpu().contiguous()
        kept[f"{tokens}.token"] = out.logits[-1].argmax().view(1).cpu()
        print(f"{tokens} tokens: {time.monotonic() - start:.1f} s, token {int(out.logits[-1].argmax())}", flush=True)
    save_file(kept, args.out)


if __name__ == "__main__":
    main()
