"""A step as vLLM's scheduler asks for it, in numbers for the decision about its drafts."""

from itertools import repeat
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]


class Scheduled(NamedTuple):
    """Of a batch of R requests."""

    slots: Ints
    """[R]: their places in the runner's request state."""
    drafts: Ints
    """[R]: drafts that the scheduler made room for."""
    rest: Ints
    """[R]: their other tokens."""
    context_tokens: int
    """Tokens computed before, at most: the host does not wait to know of drafts that are rejected."""
    sampling: int
    """Requests whose prompt is complete with this step."""

    @classmethod
    def of(
        cls, ids: list[str], tokens: dict[str, int], draft_tokens: dict[str, list[int]], req_states: Any
    ) -> "Scheduled":
        """`tokens`: by request, drafts included; `req_states`: the runner's."""
        slots = np.fromiter(map(req_states.req_id_to_index.__getitem__, ids), np.int64, len(ids))
        drafts = np.fromiter(map(len, map(draft_tokens.get, ids, repeat(()))), np.int64, len(ids))
        rest = np.fromiter(map(tokens.__getitem__, ids), np.int64, len(ids)) - drafts
        computed = req_states.num_computed_tokens_np[slots]
        complete = computed + rest >= req_states.prefill_len.np[slots]
        return cls(slots, drafts, rest, int(computed.sum()), int(np.count_nonzero(complete)))


def samples(batch: Any) -> NDArray[np.bool_]:
    """[R]: of the runner's batch, whose prompt is complete with it; as the host knows before it has run."""
    drafts = 0 if batch.num_draft_tokens_per_req is None else batch.num_draft_tokens_per_req
    complete = batch.num_computed_tokens_np + batch.num_scheduled_tokens - drafts >= batch.prefill_len_np
    return np.asarray(complete)
