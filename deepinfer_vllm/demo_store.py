"""The demo's store: what one engine has computed, an engine that starts later finds below the same directory."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import openai

RULES = "".join(f"Rule {number}: answer in the language of the question. " for number in range(200))
"""The long beginning that many questions share."""


def store_flags(directory: Path) -> tuple[str, ...]:
    """What `vllm serve` needs to keep its KV cache in `directory` and to say how much of a prompt it found."""
    places = {"root": str(directory / "store"), "index_dir": str(directory / "index")}
    sizes = {"capacity_bytes": 256 << 20, "slab_bytes": 64 << 20, "cpu_bytes_to_use": 64 << 20}
    extra = {**places, **sizes}
    config = {"kv_connector": "DeepInfer3FSConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return "--kv-transfer-config", json.dumps(config), "--enable-prompt-tokens-details"


@dataclass(frozen=True)
class Asked:
    """One question after the rules."""

    answer: str
    prompt_tokens: int
    hit_tokens: int
    """Of the prompt, found and not computed."""
    seconds: float
    """To the first token."""


def ask(client: openai.OpenAI, model: str, question: str) -> Asked:
    """The question, streamed, so that the first token's arrival is seen."""
    start = time.monotonic()
    seconds, pieces, prompt_tokens, hit_tokens = 0.0, [], 0, 0
    for chunk in client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": RULES}, {"role": "user", "content": question}],
        max_completion_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"chat_template_kwargs": {"thinking": False}, "ignore_eos": True},
    ):
        seconds = seconds or time.monotonic() - start
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        if chunk.usage:
            prompt_tokens = chunk.usage.prompt_tokens
            details = chunk.usage.prompt_tokens_details
            hit_tokens = (details.cached_tokens if details else None) or 0
    return Asked("".join(pieces), prompt_tokens, hit_tokens, seconds)
