"""What the model is asked of an item: token ids, and how to go on from them."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer_vllm.evaluation.errors import EvaluationError
from deepinfer_vllm.evaluation.final_answer import REASONING_BEGINS
from deepinfer_vllm.evaluation.settings import Settings, template_arguments
from deepinfer_vllm.evaluation.task import Item

ENDINGS = {
    "choice": 'End with "Answer: " and the letter of the right option.',
    "exact": 'End with "Answer: " and the answer alone, as short as it can be.',
    "integer": "Reason step by step, and put the final answer, an integer, in \\boxed{}.",
}


@dataclass(frozen=True)
class Question:
    """One request to the engine."""

    token_ids: list[int]
    sampling: dict[str, Any]
    """Of vLLM's SamplingParams."""
    thinks: bool = False
    """The prompt ends inside the model's reasoning."""
    option: str = ""
    """The last tokens of `token_ids` are this option's."""
    option_tokens: int = 0


class Asker:
    """Turns items into questions, with a model's tokenizer."""

    def __init__(self, tokenizer: Any, settings: Settings, defaults: dict[str, Any]) -> None:
        """`defaults`: the sampling parameters of the checkpoint's generation_config.json.

        Raises EvaluationError where the tokenizer has no chat template, or refuses the settings.
        """
        self._tokenizer = tokenizer
        self._settings = settings
        self._sampling = {**defaults, **settings.sampling, "max_tokens": settings.max_tokens}
        temperature = settings.greedy_unless_sampled()
        if temperature is not None:
            self._sampling["temperature"] = temperature

    def questions(self, item: Item) -> list[Question]:
        """One a sample; for log-likelihoods one an option. Raises EvaluationError where there is no way to ask."""
        if item.kind == "choice" and self._settings.choices == "loglikelihood":
            ids, _ = self._prompt(item, item.question, "off")
            return [self._likelihood(ids, option) for option in item.options]
        ids, thinks = self._prompt(item, text_of(item), self._settings.thinking)
        given = self._settings.sampling.get("stop") or []
        stop = [*([given] if isinstance(given, str) else given), *item.stop]
        return [
            Question(ids, {**self._sampling, "stop": stop or None, "seed": self._seed(item, sample)}, thinks)
            for sample in range(self._settings.samples)
        ]

    def _prompt(self, item: Item, text: str, thinking: str) -> tuple[list[int], bool]:
        if item.raw:
            return list(self._tokenizer.encode(text)), False
        messages = [{"role": "user", "content": text}]
        if self._settings.system is not None:
            messages.insert(0, {"role": "system", "content": self._settings.system})
        try:
            prompt = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **template_arguments(thinking)
            )
        except Exception as error:  # whatever a template raises
            raise EvaluationError(f"the chat template: {' '.join(str(error).split())}") from error
        return (
            list(self._tokenizer.encode(prompt, add_special_tokens=False)),
            prompt.rstrip().endswith(REASONING_BEGINS),
        )

    def _likelihood(self, ids: list[int], option: str) -> Question:
        tokens = list(self._tokenizer.encode(option, add_special_tokens=False))
        if not tokens:
            raise EvaluationError(f"option {option!r} has no token")
        asked = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        return Question(ids + tokens, asked, option=option, option_tokens=len(tokens))

    def _seed(self, item: Item, sample: int) -> int | None:
        """The same whatever else is asked, and in which order. None where nothing is drawn."""
        if self._sampling.get("temperature") == 0:
            return None
        text = f"{self._settings.seed}/{item.id}/{sample}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) >> 1


def text_of(item: Item) -> str:
    """The question with its options and how to end the reply; of a raw prompt the prompt itself."""
    if item.raw:
        return item.question
    return "\n\n".join([item.question, *([_listed(item.options)] if item.options else []), ENDINGS[item.kind]])


def _listed(options: Sequence[str]) -> str:
    return "\n".join(f"{letter}) {option}" for letter, option in zip(string.ascii_uppercase, options, strict=False))
