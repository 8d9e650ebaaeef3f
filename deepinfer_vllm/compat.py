"""Every change this plugin makes to vLLM beyond its registries. Each wraps and none replaces; all are re-entrant.

| shim | vLLM | why | can go when |
|---|---|---|---|
| `_hook_model_config` | 0.32, 0.33 | per-architecture config hooks are a private dict | vLLM registers them |
| `refuse_prompt_embeds` | 0.32, 0.33 | a model cannot say that it needs token ids | vLLM asks it |
| `hook_runner` | 0.32, 0.33, runner V1 | metadata lacks prompt logprobs and hit starts | runner V1 is gone |
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deepinfer_vllm import envs

if TYPE_CHECKING:
    from deepinfer_vllm.models.deepseek_v41.replay import BatchFacts

BATCH_FACTS = "deepinfer_batch_facts"
"""Key of `replay.BatchFacts` in the forward context's additional arguments."""


def apply() -> None:
    """Install every shim that this process needs. Imports no model and no runner."""
    from deepinfer_vllm.models import uses_portable_model

    if uses_portable_model():
        _hook_model_config()


def decoder_replay_enabled(vllm_config: Any) -> bool:
    """Whether prefills may skip rows past the last KV source.

    Follows vLLM's --swa-bounded-replay and ours. Needs runner V1, where `hook_runner` says what must be kept.
    """
    return bool(
        envs.DEEPINFER_VLLM_DECODER_REPLAY
        and getattr(vllm_config.cache_config, "swa_bounded_replay", True)
        and not vllm_config.use_v2_model_runner
    )


def _hook_model_config() -> None:
    """Check and adjust a V4.1 config where vLLM checks its own architectures, so that errors come before any worker.

    vLLM's own hook for the name renames a quantisation method and is called first.
    """
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    from deepinfer_vllm.models import ARCHITECTURE

    upstream = MODELS_CONFIG_MAP.get(ARCHITECTURE, VerifyAndUpdateConfig)
    if getattr(upstream, "deepinfer", False):
        return

    class PortableV41Config(upstream):  # type: ignore[misc, valid-type]
        deepinfer = True

        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None:
            from deepinfer_vllm.models.deepseek_v41.verify_config import verify_model

            verify_model(model_config)
            upstream.verify_and_update_model_config(model_config)

        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            from deepinfer_vllm.models.deepseek_v41.verify_config import verify_engine

            upstream.verify_and_update_config(vllm_config)
            verify_engine(vllm_config)

    MODELS_CONFIG_MAP[ARCHITECTURE] = PortableV41Config


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


def _batch_facts(runner: Any) -> "BatchFacts":
    from deepinfer_vllm.models.deepseek_v41.replay import BatchFacts

    ids = runner.input_batch.req_ids
    starts = runner.deepinfer_first_computed or {}
    return BatchFacts([i in runner.num_prompt_logprobs for i in ids], [starts.get(i, 0) for i in ids])
