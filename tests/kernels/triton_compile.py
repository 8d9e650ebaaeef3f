"""`python -m kernels.triton_compile DIR`: our Triton kernels compiled for NVIDIA chips, which need not be there.

At the release's sizes. Prints a line of JSON: by kernel and chip, what a program takes of a multiprocessor.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from deepinfer_vllm.triton_kernels import attention, gates

CHIPS = (80, 90)
SIZES = {"i32": ("count", "more_count", "heads", "dim", "tokens", "width"), "fp32": ("scale", "eps", "norm_eps")}


def kernels() -> dict[str, tuple[Any, dict[str, Any], dict[str, str], dict[str, int]]]:
    """By name: kernel, constants, types of pointers, options."""
    wide = {"BLOCK_ROWS": attention.BLOCK_ROWS, "WIDTH": 512, "PRODUCT": attention.PRODUCTS[torch.bfloat16]}
    wide |= {"channel_stride": 1, "more_channel_stride": 1}
    cached = dict.fromkeys(("query", "rows", "more"), "*bf16")
    cached |= {"slots": "*i64", "more_slots": "*i64", "sink": "*fp32", "out": "*fp32"}
    mixing = {"STREAMS": 4, "BLOCK": 4, "ITERATIONS": 20, "TOKENS": gates.TOKENS}
    floats = dict.fromkeys(("mixes", "norm", "base", "scale", "pre", "post", "comb"), "*fp32")
    return {
        f"attention of {heads}": (attention._attention, {**wide, "BLOCK_HEADS": heads}, cached, options)
        for heads, options in attention.OPTIONS.items()
    } | {"gates": (gates._gates, mixing, floats, {})}


def compiled(kernel: Any, constants: dict[str, Any], types: dict[str, str], options: dict[str, int], chip: int) -> Any:
    """As a launch would: what is no pointer and no constant is an integer or a float by its name."""
    named = {name: kind for kind, names in SIZES.items() for name in names} | types
    signature = {name: "constexpr" if name in constants else named.get(name, "i64") for name in kernel.arg_names}
    even = {n for n in kernel.arg_names if signature[n].startswith("*") or n.endswith("row_stride") or n == "dim"}
    multiples = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in even}
    source = ASTSource(kernel, signature, constants, multiples)
    return triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)


def usage(cubin: bytes, directory: Path) -> dict[str, int]:
    """Registers of a thread, and bytes that it keeps outside of them."""
    file = directory / "kernel.cubin"
    file.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([tool, "--dump-resource-usage", file], check=True, capture_output=True, text=True).stdout
    return {name: int(re.search(rf"\b{name}:(\d+)", text)[1]) for name in ("REG", "STACK", "LOCAL")}  # type: ignore[index]


def main(directory: Path) -> None:
    found = {}
    for name, (kernel, constants, types, options) in kernels().items():
        for chip in CHIPS:
            done = compiled(kernel, constants, types, options, chip)
            found[f"{name} sm{chip}"] = {
                "shared": done.metadata.shared,
                "warps": done.metadata.num_warps,
                **usage(done.asm["cubin"], directory),
                "products": len(re.findall(r"\b(?:mma\.sync|wgmma\.mma)", done.asm["ptx"])),
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
