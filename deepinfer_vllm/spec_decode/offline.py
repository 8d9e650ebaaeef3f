"""An engine for the offline commands of DSpark: vLLM's `LLM`, drafting, on whatever device there is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_vllm.offline_engine import EngineError, offline_engine, refusals
from deepinfer_vllm.spec_decode.prompts import Prompt


@dataclass(frozen=True)
class EngineChoice:
    """What a user may say about the engine."""

    drafts: int | None = None
    """Tokens of a draft; None for what the checkpoint was made for."""
    dtype: str = "auto"
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    draft_sample_method: str = "greedy"


class OfflineEngine:
    """`answers` and the engine itself as `llm`. One thread."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    @property
    def config(self) -> Any:
        """vLLM's configuration."""
        return self.llm.llm_engine.vllm_config

    def answers(
        self, prompts: Sequence[Prompt], max_tokens: int, temperature: float | None
    ) -> list[tuple[list[int], list[int]]]:
        """Prompt and answer of each, as token ids. `temperature`: None for what the checkpoint's generation config has.

        Shows progress on stderr. Raises EngineError for a prompt that does not fit.
        """
        from vllm import SamplingParams

        asked: dict[str, Any] = {"max_tokens": max_tokens, "detokenize": False}
        if temperature is not None:
            asked["temperature"] = temperature
        sampling = SamplingParams(**{**self.llm.model_config.get_diff_sampling_param(), **asked})
        with refusals():
            return self._answers(prompts, sampling)

    def begin(self, method: str, *args: Any) -> None:
        """Ask the workers to begin something (`DSparkWorker`). Raises EngineError where they cannot."""
        if not all(self.llm.collective_rpc(method, args=args)):
            raise EngineError("vLLM's own speculator drafts on this device, which hands out no confidences and states")

    def _answers(self, prompts: Sequence[Prompt], sampling: Any) -> list[tuple[list[int], list[int]]]:
        answered: dict[int, Any] = {}
        chats = [i for i, prompt in enumerate(prompts) if prompt.messages is not None]
        others = [i for i, prompt in enumerate(prompts) if prompt.messages is None]
        if others:
            given = [
                {"prompt": prompts[i].text} if prompts[i].text else {"prompt_token_ids": prompts[i].token_ids}
                for i in others
            ]
            answered.update(zip(others, self.llm.generate(given, sampling), strict=True))
        if chats:
            answered.update(zip(chats, self.llm.chat([prompts[i].messages for i in chats], sampling), strict=True))
        outputs = (answered[i] for i in range(len(prompts)))
        return [(list(output.prompt_token_ids), list(output.outputs[0].token_ids)) for output in outputs]


def block_size(directory: Path) -> int:
    """How many tokens a draft of the checkpoint has. Raises OSError, or EngineError where config.json does not say."""
    file = directory / "config.json"
    try:
        config = json.loads(file.read_text())
        size = config.get("text_config", config).get("dspark_block_size")
    except (ValueError, AttributeError) as error:
        raise EngineError(f"{file} is no configuration: {error}") from None
    if type(size) is not int or size < 1:
        raise EngineError(f"{file}: dspark_block_size = {size!r}; use a checkpoint with DSpark's draft layers")
    return size


@contextmanager
def engine(
    directory: Path, choice: EngineChoice, environment: Mapping[str, str], **arguments: Any
) -> Iterator[OfflineEngine]:
    """An engine on a checkpoint with DSpark, stopped at the end. `environment` is set for it and for its workers."""
    if choice.max_model_len is not None:
        arguments["max_model_len"] = choice.max_model_len
    speculative = {
        "method": "dspark",
        "num_speculative_tokens": choice.drafts or block_size(directory),
        "draft_sample_method": choice.draft_sample_method,
    }
    with offline_engine(
        str(directory),
        environment,
        dtype=choice.dtype,
        tensor_parallel_size=choice.tensor_parallel_size,
        tokenizer_mode="auto" if arguments.get("skip_tokenizer_init") else "deepseek_v41",
        speculative_config=speculative,
        worker_extension_cls="deepinfer_vllm.spec_decode.worker_tools.DSparkWorker",
        **arguments,
    ) as llm:
        yield OfflineEngine(llm)
