"""Where in its output a request's grammar begins, when the model reasons first.

The engine core decides that with its reasoning parser, from settings of the request that workers do not get. What they
do get are its masks. While the model reasons these are all ones; vLLM 0.33 takes out a few tokens that would end it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput

    from deepinfer_vllm.spec_decode.grammar_state import GrammarState


Masks = dict[str, NDArray[np.int32]]


def first_masks(output: GrammarOutput, drafts: Mapping[str, Sequence[int]], stride: int) -> Masks:
    """Of each request the mask [words] of its first position in this step.

    `drafts` are the scheduled ones. vLLM 0.32 gives a request a mask for each and one more; 0.33 gives `stride` to all.
    Nothing where there are more or fewer masks than that.
    """
    ids, masks = output.structured_output_request_ids, output.grammar_bitmask
    rows = [stride if len(masks) == stride * len(ids) else 1 + len(drafts.get(name, ())) for name in ids]
    if sum(rows) != len(masks):
        return {}
    return {name: masks[end - count] for name, end, count in zip(ids, np.cumsum(rows), rows, strict=True)}


class GrammarStart:
    """The search for one request's first token under its grammar."""

    def __init__(self) -> None:
        self._earliest = 0
        self._latest: tuple[int, NDArray[np.int32]] | None = None

    def observe(self, outputs: int, mask: NDArray[np.int32]) -> None:
        """The engine draws the output token after the first `outputs` ones under this mask [words]."""
        self._latest = None if (mask == -1).all() else (outputs, mask.copy())
        if self._latest is None:
            self._earliest = outputs

    def locate(self, state: GrammarState, output: list[int]) -> int | None:
        """The index of the output token from which the grammar, at its beginning in `state`, gives the latest mask.

        None where there is none such: the model still reasons, and the grammar begins no earlier than here.
        """
        if self._latest is None:
            return None
        end, mask = self._latest
        bitmask = torch.empty(1, len(mask), dtype=torch.int32)
        for start in range(self._earliest, end + 1):
            tokens = output[start:end]
            if state.fits(tokens):
                for token in tokens:
                    state.draft(token)
                same = state.fill(bitmask, 0) and bool((bitmask[0].numpy() == mask).all())
                state.take_back()
                if same:
                    return start
        self._earliest = end
        return None
