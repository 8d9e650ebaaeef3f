"""What runner V2 keeps for the model beside its caches: from where a request has been computed, and what it wants.

vLLM's hook: the model names this class in `get_model_state_cls`; what `prepare_inputs` returns reaches its forward.
"""

from typing import Any, NamedTuple

from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from deepinfer_vllm.models.deepseek_v41.replay import BatchFacts


class RequestFacts(NamedTuple):
    """A request's part of `BatchFacts`."""

    keep_all: bool = False
    first_computed: int = 0
    cached_until: int = 0


class ReplayModelState(DefaultModelState):
    """vLLM's own state, and the facts of bounded replay."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._facts: dict[str, RequestFacts] = {}

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """vLLM's hook, for new and for resumed requests."""
        super().add_request(req_index, new_req_data)
        params, start = new_req_data.sampling_params, new_req_data.replay_start
        keep_all = params is not None and (
            params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None
        )
        cached_until = start + self.model.config.window if start else 0
        self._facts[new_req_data.req_id] = RequestFacts(keep_all, start, cached_until)

    def remove_request(self, req_id: str) -> None:
        """vLLM's hook, when a request ends or is preempted."""
        super().remove_request(req_id)
        self._facts.pop(req_id, None)

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        """vLLM's hook. Of the requests of a dummy batch nothing is known."""
        ids = input_batch.req_ids
        for request_id, computed in zip(ids, input_batch.num_computed_tokens_np.tolist(), strict=True):
            known = self._facts.get(request_id)
            if known is not None and computed < known.first_computed:  # what it hit could not be loaded
                self._facts[request_id] = RequestFacts(known.keep_all, computed)
        facts = [self._facts.get(request_id, RequestFacts()) for request_id in ids]
        return {**super().prepare_inputs(input_batch, req_states), "facts": BatchFacts(*zip(*facts, strict=True))}
