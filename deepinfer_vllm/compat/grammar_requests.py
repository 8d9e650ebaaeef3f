"""Requests' grammars for whoever drafts: runner V2 keeps them from its speculator."""

import functools
from typing import Any


def hook_grammar_requests() -> None:
    """Tell a speculator that has `grammar`, a GrammarDrafts, which requests come and go, and the engine's masks.

    vLLM gives a speculator batches of numbers only, and gives masks to the sampler alone. Called as a GrammarDrafts is
    made.
    """
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    if hasattr(GPUModelRunner, "deepinfer_scheduled_drafts"):
        return
    GPUModelRunner.deepinfer_scheduled_drafts = {}
    add, finish, sample = GPUModelRunner.add_requests, GPUModelRunner.finish_requests, GPUModelRunner.sample_tokens

    @functools.wraps(add)
    def add_and_tell(self: Any, scheduler_output: Any) -> None:
        add(self, scheduler_output)
        if (requests := _requests(self)) is not None:
            requests.add(scheduler_output.scheduled_new_reqs, self.req_states)
            self.deepinfer_scheduled_drafts = scheduler_output.scheduled_spec_decode_tokens

    @functools.wraps(finish)
    def finish_and_tell(self: Any, scheduler_output: Any) -> None:
        finish(self, scheduler_output)
        if (requests := _requests(self)) is not None:
            requests.finish(scheduler_output.finished_req_ids)

    @functools.wraps(sample)
    def tell_and_sample(self: Any, grammar_output: Any) -> Any:
        if (requests := _requests(self)) is not None:
            requests.see_masks(grammar_output, self.deepinfer_scheduled_drafts)
        return sample(self, grammar_output)

    GPUModelRunner.add_requests = add_and_tell
    GPUModelRunner.finish_requests = finish_and_tell
    GPUModelRunner.sample_tokens = tell_and_sample


def _requests(runner: Any) -> Any:
    return getattr(getattr(runner.speculator, "grammar", None), "requests", None)
