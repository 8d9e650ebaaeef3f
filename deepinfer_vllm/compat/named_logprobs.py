"""Logprobs of tokens that a request names: runner V1 then lists nothing else for the other requests of the batch."""

import functools
from typing import Any


def list_for_each_what_it_asked() -> None:
    """Where answers must not depend on the batch, let `logprob_token_ids` of a request change its own rows only.

    vLLM's first sampler replaces the most likely tokens of every row by the named ones, and rows that name none get
    impossible ones. Called as such a model is built.
    """
    from vllm.v1.sample.sampler import Sampler

    forward, gather = Sampler.forward, Sampler.gather_specific_token_logprobs
    if hasattr(forward, "deepinfer_hooked"):
        return

    @functools.wraps(forward)
    def forward_knowing(self: Any, logits: Any, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        self.deepinfer_most_listed = sampling_metadata.max_num_logprobs
        return forward(self, logits, sampling_metadata, *args, **kwargs)

    @functools.wraps(gather)
    def gather_for_each(self: Any, logprobs: Any, named: dict[int, list[int]], sampled: Any) -> Any:
        from deepinfer_vllm.native import invariance

        found = gather(self, logprobs, named, sampled)
        most = self.deepinfer_most_listed
        others = [row for row in range(len(logprobs)) if row not in named]
        if found is None or not most or not others or not invariance.decided():
            return found
        listed = self.gather_logprobs(logprobs[others], most, sampled[others])
        ids, scores, ranks = found[:3]
        more = max(0, most + 1 - ids.shape[1])
        ids, scores = _widened(ids, more, 0), _widened(scores, more, -float("inf"))
        ids[others, : most + 1], scores[others, : most + 1] = listed.logprob_token_ids, listed.logprobs
        return found._replace(logprob_token_ids=ids, logprobs=scores, selected_token_ranks=ranks)

    forward_knowing.deepinfer_hooked = True  # type: ignore[attr-defined]
    Sampler.forward, Sampler.gather_specific_token_logprobs = forward_knowing, gather_for_each


def _widened(rows: Any, columns: int, value: float) -> Any:
    from torch.nn.functional import pad

    return pad(rows, (0, columns), value=value)
