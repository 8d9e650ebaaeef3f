"""What runner V1 knows of a batch and its metadata does not say, for decoder-side replay."""

import functools
from typing import Any

BATCH_FACTS = "deepinfer_batch_facts"
"""Key, in the forward context's additional arguments, of two lists in batch order: whether every hidden state of the
request is wanted, and from which position on it has been computed here without a gap."""


def hook_runner() -> None:
    """Let runner V1 tell the model what decoder-side replay must keep; called as the model is built."""
    from vllm.forward_context import get_forward_context
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if hasattr(GPUModelRunner, "deepinfer_first_computed"):
        return
    GPUModelRunner.deepinfer_first_computed = None
    update_states, model_forward = GPUModelRunner._update_states, GPUModelRunner._model_forward

    @functools.wraps(update_states)
    def update_and_note_starts(self: Any, scheduler_output: Any) -> Any:
        result = update_states(self, scheduler_output)
        if self.deepinfer_first_computed is None:
            self.deepinfer_first_computed = {}
        starts: dict[str, int] = self.deepinfer_first_computed
        for request_id in scheduler_output.finished_req_ids:
            starts.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            starts[new.req_id] = new.replay_start
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if request_id in cached.resumed_req_ids:
                starts[request_id] = computed
        return result

    @functools.wraps(model_forward)
    def forward_with_facts(self: Any, *args: Any, **kwargs: Any) -> Any:
        get_forward_context().additional_kwargs[BATCH_FACTS] = _batch_facts(self)
        return model_forward(self, *args, **kwargs)

    GPUModelRunner._update_states = update_and_note_starts
    GPUModelRunner._model_forward = forward_with_facts


def _batch_facts(runner: Any) -> tuple[list[bool], list[int]]:
    ids = runner.input_batch.req_ids
    starts = runner.deepinfer_first_computed or {}
    return [_wants_prompt_logprobs(runner.requests[i]) for i in ids], [starts.get(i, 0) for i in ids]


def _wants_prompt_logprobs(request: Any) -> bool:
    """From its parameters: the runner's own list forgets a request once it has them, and the request may resume."""
    params = request.sampling_params
    return params is not None and params.prompt_logprobs is not None
