"""Whether a reply is right."""

from dataclasses import dataclass

from deepinfer_vllm.evaluation import choices, exact, integers
from deepinfer_vllm.evaluation.final_answer import boxed, marked
from deepinfer_vllm.evaluation.task import Item


@dataclass(frozen=True)
class Score:
    """`answer`: what the reply was taken to say, None for nothing. `how`: by which rule."""

    correct: bool
    answer: str | None
    how: str


def score(item: Item, reply: str, strict: bool = False) -> Score:
    """Score a reply without its reasoning. Never raises, takes time linear in the reply.

    `strict`: of an integer, only what is boxed or marked; otherwise, without these, the last number of the reply.
    """
    if item.kind == "choice":
        answer, how = choices.chosen(reply, item.options)
    elif item.kind == "exact":
        answer, how = exact.given(reply)
    else:
        answer, how = _integer(reply, strict)
    return Score(answer in item.answers, answer, how)


def _integer(reply: str, strict: bool) -> tuple[str | None, str]:
    box = boxed(reply)
    places = [(box, "boxed")] if box is not None else []
    for text, how in [*places, *((rest, "marked") for rest in marked(reply))]:
        found = integers.stated(text)
        if found is not None:
            return found, how
    found = None if strict or box is not None else integers.last(reply)
    return found, "" if found is None else "last"
