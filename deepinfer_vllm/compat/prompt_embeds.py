"""Prompt embeddings refused for models that need token ids."""

import functools
from collections.abc import Callable
from typing import Any


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
