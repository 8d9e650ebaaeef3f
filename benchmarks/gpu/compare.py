"""Relative errors between what states.py and reference_states.py have saved: by layer, of the last rows of each prompt.

Example: python benchmarks/gpu/compare.py /tmp/states plain:upstream qat:upstream --out oracle.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b|, of all values."""
    return float((a - b).norm() / b.norm())


def compare(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, Any]:
    """By prompt length, where both have it: errors of states by layer, hidden states, logits; do tokens agree?"""
    table: dict[str, Any] = {}
    for tokens in sorted({int(name.partition(".")[0]) for name in found.keys() & wanted.keys()}):
        a, b = ({part: side[f"{tokens}.{part}"] for part in ("aux", "hidden", "logits")} for side in (found, wanted))
        best = b["logits"].topk(2, dim=-1).values
        table[str(tokens)] = {
            "layers": [round(relative(x, y), 5) for x, y in zip(a["aux"], b["aux"], strict=True)],
            "hidden": round(relative(a["hidden"], b["hidden"]), 5),
            "logits": round(relative(a["logits"], b["logits"]), 5),
            "largest logit error": round(float((a["logits"] - b["logits"]).abs().max()), 3),
            "median gap of the best two": round(float((best[:, 0] - best[:, 1]).median()), 3),
            "same best token": f"{int((a['logits'].argmax(-1) == b['logits'].argmax(-1)).sum())} of {len(best)}",
        }
    return table


def main() -> None:
    """Compare the pairs and write oracle.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("states", type=Path, help="directory of NAME.safetensors files")
    parser.add_argument(
        "pairs", nargs="+", metavar="FOUND:WANTED", help="names; errors are relative to WANTED's values"
    )
    parser.add_argument("--out", type=Path, default=Path("oracle.json"), help="default: oracle.json")
    args = parser.parse_args()
    tables = {}
    for pair in args.pairs:
        found, _, wanted = pair.partition(":")
        missing = [name for name in (found, wanted) if not (args.states / f"{name}.safetensors").is_file()]
        if missing:
            print(f"compare.py: no {args.states / missing[0]}.safetensors: {pair} is left out", file=sys.stderr)
            continue
        sides = (load_file(args.states / f"{name}.safetensors") for name in (found, wanted))
        tables[f"{found} against {wanted}"] = table = compare(*sides)
        for tokens, row in table.items():
            print(f"{found} against {wanted}, {tokens} tokens: {row}")
    args.out.write_text(json.dumps(tables, indent=1) + "\n")
    sys.exit(not tables)


if __name__ == "__main__":
    main()
