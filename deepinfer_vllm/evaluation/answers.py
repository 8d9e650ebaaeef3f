"""An engine that answers a stream of items, each by itself: one that cannot be answered fails alone."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepinfer_vllm.evaluation.questions import Question
from deepinfer_vllm.evaluation.settings import sampling_params


@dataclass
class Pending:
    """An item in the engine."""

    key: str
    questions: Sequence[Question]
    outputs: dict[int, Any] = field(default_factory=dict)

    def request_ids(self) -> list[str]:
        """One a question; `rpartition("/")` gives the key and the question's place again."""
        return [f"{self.key}/{number}" for number in range(len(self.questions))]


def answered(
    engine: Any, asked: Iterable[tuple[str, Sequence[Question]]], in_flight: int
) -> Generator[tuple[str, list[Any] | str]]:
    """Of each key, as soon as it is done, the engine's outputs in the order of its questions, or why there are none.

    `engine`: vLLM's LLMEngine. About `in_flight` requests are in it at a time, so that the file of a run that is killed
    lacks little. Leaving the iterator early aborts what is in the engine. Raises what the engine dies of.
    """
    waiting, pending, count = iter(asked), dict[str, Pending](), 0
    more = True
    try:
        while more or pending:
            while more and count < in_flight:
                key, questions = next(waiting, (None, ()))
                more = key is not None
                if key is None:
                    break
                reason = _added(engine, item := Pending(key, questions))
                if reason is not None:
                    yield key, reason
                    continue
                pending[key] = item
                count += len(questions)
            if not pending:
                continue
            for output in engine.step():
                if not output.finished:
                    continue
                key, _, number = output.request_id.rpartition("/")
                item = pending[key]
                item.outputs[int(number)] = output
                count -= 1
                if len(item.outputs) == len(item.questions):
                    del pending[key]
                    yield key, [item.outputs[n] for n in range(len(item.questions))]
    finally:
        engine.abort_request([name for item in pending.values() for name in item.request_ids()])


def _added(engine: Any, item: Pending) -> str | None:
    """Give the item's questions to the engine; the reason where it refuses one, and then it has none of them."""
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind

    names = item.request_ids()
    fixed = {"skip_special_tokens": False, "output_kind": RequestOutputKind.FINAL_ONLY.value}
    for number, (name, question) in enumerate(zip(names, item.questions, strict=True)):
        try:
            params = sampling_params({**question.sampling, **fixed})
            engine.add_request(name, {"prompt_token_ids": question.token_ids}, params)
        except (ValueError, VLLMClientError) as error:
            engine.abort_request(names[:number])
            return " ".join(str(error).split())
    return None
