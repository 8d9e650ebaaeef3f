"""What a trace of loads comes to under other placements."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer_vllm.eplb.errors import EplbError
from deepinfer_vllm.eplb.moe_lb import drawn_loads, moe_lb
from deepinfer_vllm.eplb.policy import place

Array = Any

MOST_SLOTS, MOST_LOADS = 1 << 20, 1 << 28
"""Of a layer; and of steps, layers and ranks multiplied, 2 GiB. No engine comes near."""


@dataclass(frozen=True)
class Row:
    """moe_lb of one layer, or of all, on the second half of a trace; tokens fall to an expert's replicas by chance."""

    hottest: float
    """The largest expert's load over the mean expert's."""
    static: float
    """With vLLM's first layout, which no rearrangement has changed."""
    placed: float
    """With `place` on the first half."""
    hindsight: float
    """With `place` on the half that measures it: what there was to gain."""
    floor: float
    """If ranks had equal shares and only the draw of tokens made a difference."""


def analyse(counts: Array, ranks: int, physical: int, nodes: int = 1) -> tuple[Row, list[Row]]:
    """counts [T, L, E], at least two steps, to all layers together and each. Raises EplbError."""
    if len(counts) < 2:
        raise EplbError("a trace of one step has no second half to measure a placement on; record more steps")
    if physical > MOST_SLOTS or len(counts) * counts.shape[1] * ranks > MOST_LOADS:
        raise EplbError(
            f"{physical:,} slots on {ranks:,} ranks, over {len(counts):,} steps of {counts.shape[1]} layers, are more "
            "than this takes; give fewer ranks or redundant experts"
        )
    before, after = np.array_split(counts, 2)
    layers, experts = counts.shape[1:]
    placements = (
        np.tile((np.arange(physical) % experts).astype(np.int32), (layers, 1)),
        place(before, ranks, physical, nodes=nodes),
        place(after, ranks, physical, nodes=nodes),
    )
    loads = [drawn_loads(after, placement, ranks) for placement in placements]
    loads.append(_drawn(after.sum(2), ranks))
    sums = after.sum(0, dtype=np.int64)
    hottest = sums.max(1) / np.maximum(sums.mean(1), 1e-9)

    def row(which: slice) -> Row:
        static, placed, hindsight, floor = (moe_lb(each[:, which]) for each in loads)
        return Row(float(hottest[which].max()), static, placed, hindsight, floor)

    return row(slice(None)), [row(slice(layer, layer + 1)) for layer in range(layers)]


def _drawn(totals: Array, ranks: int) -> Array:
    """[T, L] tokens to [T, L, ranks], each to a rank by chance; always the same draw."""
    return np.random.default_rng(0).multinomial(totals, np.full(ranks, 1 / ranks)).astype(np.float64)
