"""Exact match of short answers, up to case, white space and what stands around them."""

import unicodedata

from deepinfer_vllm.evaluation.final_answer import boxed, marked

_AROUND = " \t\n\"'`*_.,;:!?()[]{}$«»“”‘’"


def normalised(text: str) -> str:
    """NFKC, case folded, white space as single blanks, and no quotes, brackets, emphasis and full stops around it."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).strip(_AROUND)


def given(reply: str) -> tuple[str | None, str]:
    """The answer, normalised, and how it was found: boxed, marked or whole, the reply as it is. None: an empty one."""
    box = boxed(reply)
    places = [(box, "boxed")] if box is not None else []
    for text, how in [*places, *((rest, "marked") for rest in marked(reply)), (reply, "whole")]:
        answer = normalised(text)
        if answer:
            return answer, how
    return None, ""
