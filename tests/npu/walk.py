"""What a forward pass of V4.1 asks of a device, by name: `python -m npu.walk`, where vLLM finds the emulated one.

Operations are met twice. Where torch hands them out they have the names that a plugin for a device registers: what is
made of other operations, whatever the device, has been taken apart. Some of these torch would make of further ones if
the device had not got them; `reaches` has what then came to the device.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepinfer_vllm.checkpoint.backends import BareBackend, EngineBackend
from deepinfer_vllm.checkpoint.topology import random_config
from deepinfer_vllm.checkpoint.vision import VisionConfig
from deepinfer_vllm.checkpoint.writer import write_checkpoint
from deepinfer_vllm.models.deepseek_v41.dspark import DSparkV41DraftModel
from deepinfer_vllm.models.deepseek_v41.model import DeepseekV41ForCausalLM
from engine.harness import GOLDEN, golden_prompts, sample
from engine.test_dspark import COUNT, Case, accepted, make_case, start
from images import noise
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
def entered(walk: Walk) -> Iterator[Counter[tuple[type, str]]]:
    """Walk what vLLM's runner has the models compute; gives how often it came in by each of the entrances."""
    times: Counter[tuple[type, str]] = Counter()
    originals = {(cls, name): getattr(cls, name) for cls, names in ENTRANCES.items() for name in names}

    def walked(entrance: tuple[type, str], method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            times[entrance] += 1
            with walk:
                return method(*args, **kwargs)

        return call

    try:
        for (cls, name), method in originals.items():
            setattr(cls, name, walked((cls, name), method))
        yield times
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


def walk_images(walk: Walk, directory: Path, dtype: str) -> None:
    """The tower and the aligner, and a prompt with two images."""
    from vllm.models.deepseek_v41.common.mm_preprocess import DeepseekV4VLProcessor

    backend = BareBackend(directory, dtype, "plain")
    model = backend._model
    try:
        config = model.vllm_config.model_config.hf_config
        processed = DeepseekV4VLProcessor(config)(images=[noise(100, 60), noise(33, 90, seed=1)])
        with walk, torch.inference_mode():
            spans = model.model.embed_multimodal(**processed)
            model.prefill(torch.tensor([5, *[config.image_token_id] * sum(map(len, spans)), 9]), images=spans)
    finally:
        backend.close()


def walk_engine(walk: Walk, case: Case) -> None:
    """Several requests at once, greedy and sampled, as vLLM's runner V2 drives them, with the drafts of each step."""
    os.environ["DEEPINFER_VLLM_DSPARK_BUDGET"] = "fixed"  # a budget draws some or none, by the clock
    backend: EngineBackend = start(case, runner="V2")
    try:
        with entered(walk) as times:
            answers = [found.ids for found in backend.generate_many(case.prompts, COUNT, logits=False)]
            drafted, stood = accepted(backend)
            sample(backend, case.prompts, 8)
    finally:
        backend.close()
    assert answers == case.answers and 0 < stood < drafted, f"{stood} of {drafted} drafts stood"
    assert all(times[cls, name] for cls, names in ENTRANCES.items() for name in names), times


def main() -> None:
    """Print the walk as JSON, in the last line."""
    walk = Walk()
    for each in PASSES:
        print(*each, file=sys.stderr, flush=True)
        walk_bare(walk, *each)
    with tempfile.TemporaryDirectory() as folder:
        seeing, drafting = Path(folder, "seeing"), Path(folder, "drafting")
        write_checkpoint(seeing, random_config(7, vision=VisionConfig()), seed=1)
        for dtype in ("float32", "bfloat16"):
            print("images", dtype, file=sys.stderr, flush=True)
            walk_images(walk, seeing, dtype)
        print("drafts", file=sys.stderr, flush=True)
        walk_engine(walk, make_case(drafting))
    print(json.dumps(walk.report()))


if __name__ == "__main__":
    main()
