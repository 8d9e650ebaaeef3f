"""What is kept of an item: a line of the results."""

from __future__ import annotations

import string
from collections.abc import Sequence
from math import fsum
from typing import Any

from deepinfer_vllm.evaluation.final_answer import without_reasoning
from deepinfer_vllm.evaluation.questions import Question
from deepinfer_vllm.evaluation.scoring import score
from deepinfer_vllm.evaluation.task import Item

Json = dict[str, Any]


def failed(item: Item, reason: str) -> Json:
    """Of an item that was not answered."""
    return {"id": item.id, "kind": item.kind, "failed": reason}


def record(item: Item, questions: Sequence[Question], outputs: Sequence[Any]) -> Json:
    """Of an item that was: replies whole, or options' log-likelihoods; `scored` says what of them is right."""
    head: Json = {"id": item.id, "kind": item.kind, "prompt_tokens": len(questions[0].token_ids)}
    if questions[0].option_tokens:
        head["prompt_tokens"] -= questions[0].option_tokens
        return {**head, "options": [_option(q, output) for q, output in zip(questions, outputs, strict=True)]}
    return {**head, "samples": [_sample(q, output.outputs[0]) for q, output in zip(questions, outputs, strict=True)]}


def _sample(question: Question, output: Any) -> Json:
    return {
        "text": output.text,
        "tokens": len(output.token_ids),
        "finish_reason": output.finish_reason,
        "seed": question.sampling["seed"],
        "thinks": question.thinks,
    }


def _option(question: Question, output: Any) -> Json:
    """Sum over the option's tokens, in nats."""
    tokens = question.token_ids[-question.option_tokens :]
    tail = output.prompt_logprobs[-question.option_tokens :]
    logprob = fsum(values[token].logprob for token, values in zip(tokens, tail, strict=True))
    return {"logprob": logprob, "tokens": len(tokens), "bytes": len(question.option.encode())}


def scored(item: Item, found: Json, strict: bool) -> Json:
    """The record with "correct" [samples], and what was read from each sample or chosen of the options."""
    if "failed" in found:
        return found
    if "options" in found:
        by_sum = _best([option["logprob"] for option in found["options"]])
        by_byte = _best([option["logprob"] / option["bytes"] for option in found["options"]])
        return {
            **found,
            "answer": by_sum,
            "answer_per_byte": by_byte,
            "correct": [by_sum in item.answers],
            "correct_per_byte": [by_byte in item.answers],
        }
    samples = []
    for sample in found["samples"]:
        reply = without_reasoning(sample["text"], sample["thinks"])
        if reply is None:
            samples.append({**sample, "answer": None, "how": "reasoning not finished", "correct": False})
        else:
            samples.append({**sample, **vars(score(item, reply, strict))})
    return {**found, "samples": samples, "correct": [sample["correct"] for sample in samples]}


def _best(values: Sequence[float]) -> str:
    """Letter of the highest; the first of equal ones."""
    return string.ascii_uppercase[max(range(len(values)), key=values.__getitem__)]
