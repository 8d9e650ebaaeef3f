"""What a forward pass of V4.1 asks of a device, by name: `python -m npu.walk`, where vLLM finds the emulated one.

Operations are met twice. Where torch hands them out they have the names that a plugin for a device registers: what is
made of other operations, whatever the device, has been taken apart. Some of these torch would make of further ones if
the device had not got them; `reaches` has what then came to the device.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepinfer_vllm.checkpoint.backends import BareBackend, EngineBackend
from deepinfer_vllm.models.deepseek_v41.dspark import DSparkV41DraftModel
from deepinfer_vllm.models.deepseek_v41.model import DeepseekV41ForCausalLM
from engine.harness import GOLDEN, golden_prompts
from engine.test_dspark import Case, make_case, start
from npu import kernels
from npu.memory import on_device

PASSES = (
    ("v41-tiny-a", "float32", "plain"),
    ("v41-tiny-b", "bfloat16", "plain"),
    ("v41-tiny-a", "bfloat16", "qat"),
    ("v41-tiny-a-fp8", "bfloat16", "plain"),
)
"""Checkpoint, dtype and numerics: both topologies, rounded rows, packed weights."""
ENTRANCES: dict[type, tuple[str, ...]] = {
    DeepseekV41ForCausalLM: ("forward", "compute_logits"),
    DSparkV41DraftModel: (
        *("forward", "compute_draft_logits", "combine_hidden_states", "precompute_and_store_context_kv"),
        *("markov_embed", "markov_bias", "compute_confidence"),
    ),
}
"""By which vLLM's runner enters the models."""
PROMPT, DECODED = 160, 3
"""Tokens: more than are multiplied at once, selected, or in candidate blocks."""


class Walk(TorchDispatchMode):
    """Keeps what operations on the device were met under it."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, set[str]] = {}
        self.reaches: dict[str, set[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reached: set[str] = set()
        with kernels.watching(lambda op: reached.add(op._name)):
            out = func(*args, **(kwargs or {}))
        met = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor) and on_device(t)]
        if met:
            self.dtypes.setdefault(func._name, set()).update(str(t.dtype).removeprefix("torch.") for t in met)
            self.reaches.setdefault(func._name, set()).update(reached)
        return out

    def report(self) -> dict[str, Any]:
        """Dtypes of operands and results, and what reached the device, by operation."""
        return {
            name: {"dtypes": sorted(dtypes), "reaches": sorted(self.reaches[name])}
            for name, dtypes in sorted(self.dtypes.items())
        }


@contextlib.contextmanager
def entered(walk: Walk) -> Iterator[None]:
    """Walk what vLLM's runner has the models compute."""
    originals = {(cls, name): getattr(cls, name) for cls, names in ENTRANCES.items() for name in names}

    def walked(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with walk:
                return method(*args, **kwargs)

        return call

    try:
        for (cls, name), method in originals.items():
            setattr(cls, name, walked(method))
        yield
    finally:
        for (cls, name), method in originals.items():
            setattr(cls, name, method)


def walk_bare(walk: Walk, name: str, dtype: str, numerics: str) -> None:
    """The modules by themselves: a golden prompt, then a few tokens one by one."""
    prompt = max((p.input_ids for p in golden_prompts(name)), key=len)[:PROMPT]
    backend = BareBackend(GOLDEN / name, dtype, numerics)
    try:
        with walk:
            backend._model.generate(prompt, DECODED)
    finally:
        backend.close()


def walk_engine(walk: Walk, case: Case) -> None:
    """Several requests at once and their drafts, as vLLM's runner V2 drives them, sampled and greedy."""
    backend: EngineBackend = start(case, runner="V2")
    try:
        with entered(walk):
            backend.generate_many(case.prompts, 8, logits=False)
    finally:
        backend.close()


def main() -> None:
    """Print the walk as JSON, in the last line."""
    walk = Walk()
    for each in PASSES:
        print(*each, file=sys.stderr, flush=True)
        walk_bare(walk, *each)
    with tempfile.TemporaryDirectory() as folder:
        walk_engine(walk, make_case(Path(folder)))
    print(json.dumps(walk.report()))


if __name__ == "__main__":
    main()
