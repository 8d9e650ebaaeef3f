"""Every change this plugin makes to vLLM beyond its registries. Each wraps and none replaces; all are re-entrant.

| shim | vLLM | why | can go when |
|---|---|---|---|
| `hook_model_config` | 0.32, 0.33 | per-architecture config hooks are a private dict | vLLM registers them |
| `refuse_prompt_embeds` | 0.32, 0.33 | a model cannot say that it needs token ids | vLLM asks it |
| `hook_seeded_sampling` | 0.32, 0.33, runner V1 | CPU generators have no offset to rewind by | vLLM needs none |
| `hook_runner` | 0.32, 0.33, runner V1 | metadata lacks prompt logprobs and hit starts | runner V1 is gone |
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

BATCH_FACTS = "deepinfer_batch_facts"
"""Key, in the forward context's additional arguments, of two lists in batch order: whether every hidden state of the
request is wanted, and from which position on it has been computed here without a gap."""


def hook_model_config(architecture: str, module: str) -> None:
    """Let `module` check and adjust configs where vLLM checks its own architectures: errors come before any worker.

    `module` has verify_model(model_config) and verify_engine(vllm_config) and is imported when a config is there.
    vLLM's own hook for the architecture is called too.
    """
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    upstream = MODELS_CONFIG_MAP.get(architecture, VerifyAndUpdateConfig)
    if getattr(upstream, "deepinfer_hooked", False):
        return

    class HookedConfig(upstream):  # type: ignore[misc, valid-type]
        deepinfer_hooked = True

        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None:
            importlib.import_module(module).verify_model(model_config)
            upstream.verify_and_update_model_config(model_config)

        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            upstream.verify_and_update_config(vllm_config)
            importlib.import_module(module).verify_engine(vllm_config)

    MODELS_CONFIG_MAP[architecture] = HookedConfig


def refuse_prompt_embeds(needs_ids: str) -> None:
    """Answer prompt embeddings for models marked `deepinfer_needs_token_ids` with status 400 and this message.

    vLLM's own refusal asks for --enable-prompt-embeds, which would not help.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers.base import BaseRenderer

    if hasattr(BaseRenderer, "deepinfer_checks_embeds"):
        return
    BaseRenderer.deepinfer_checks_embeds = True

    def checked(method: Any, is_embeds: Callable[[Any], bool]) -> Any:
        @functools.wraps(method)
        def check(self: Any, prompt: Any) -> Any:
            if is_embeds(prompt) and getattr(self.model_config, "deepinfer_needs_token_ids", False):
                raise VLLMValidationError(needs_ids, parameter="prompt_embeds")
            return method(self, prompt)

        return check

    for name in ("render_prompt", "_render_prompt_async"):
        setattr(BaseRenderer, name, checked(getattr(BaseRenderer, name), lambda prompt: isinstance(prompt, bytes)))
    BaseRenderer._process_embeds = checked(BaseRenderer._process_embeds, lambda _: True)


def hook_seeded_sampling() -> None:
    """Let runner V1 take back what a seeded request drew for an incomplete prompt also where generators have no offset.

    Without it a seeded request whose prompt takes two steps ends the engine. Called as the model is built.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if hasattr(GPUModelRunner, "deepinfer_generator_states"):
        return
    GPUModelRunner.deepinfer_generator_states = {}
    sample, bookkeep = GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync

    @functools.wraps(sample)
    def sample_and_remember(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        self.deepinfer_generator_states = {i: g.get_state() for i, g in generators.items() if not _has_offset(g)}
        return sample(self, *args, **kwargs)

    @functools.wraps(bookkeep)
    def bookkeep_and_rewind(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators, states = self.input_batch.generators, self.deepinfer_generator_states
        self.input_batch.generators = {
            i: _StateRewind(g, states[i]) if i in states else g for i, g in generators.items()
        }
        try:
            return bookkeep(self, *args, **kwargs)
        finally:
            self.input_batch.generators = generators

    GPUModelRunner._sample = sample_and_remember
    GPUModelRunner._bookkeeping_sync = bookkeep_and_rewind


def _has_offset(generator: Any) -> bool:
    try:
        generator.get_offset()
    except RuntimeError:
        return False
    return True


class _StateRewind:
    """A generator to which any new offset means: back to where it was before this step."""

    def __init__(self, generator: Any, state: Any) -> None:
        self._generator, self._state = generator, state

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        self._generator.set_state(self._state)


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
            starts[new.req_id] = new.num_computed_tokens
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
