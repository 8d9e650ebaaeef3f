"""The letter of the option that a reply chooses."""

import re
import string
from collections.abc import Sequence

from deepinfer_vllm.evaluation.exact import normalised
from deepinfer_vllm.evaluation.final_answer import boxed, marked
from deepinfer_vllm.evaluation.integers import cleaned

MAX_OPTIONS = len(string.ascii_uppercase)

_NAMED = re.compile(r"[\s*_$\"'`\\]{0,8}(?:(?:option|choice)\s{1,4})?[\s*_$\"'`\\]{0,8}", re.IGNORECASE)
_LETTER = re.compile(r"\(([A-Za-z])\)|\[([A-Za-z])\]|([A-Z])(?![\w'’])|([a-z])[.)]?\s{0,8}$")
_ALONE = re.compile(r"[\s*_]{0,8}(?:\(([A-Z])\)|([A-Z])(?:[.):]|[\s*_.]{0,8}$))")


def chosen(reply: str, options: Sequence[str]) -> tuple[str | None, str]:
    """The letter and how it was found: boxed, marked, alone, option; (None, "") for a reply that chooses none.

    Boxed before marked ("answer is B") before a reply that begins with a letter ("B", "(B) Paris", "B. Paris") or is an
    option's text. A letter that no option has is passed over.
    """
    letters = string.ascii_uppercase[: len(options)]
    box = boxed(reply)
    places = [(box, "boxed")] if box is not None else []
    for text, how in [*places, *((rest, "marked") for rest in marked(reply))]:
        found = _letter(text, letters)
        if found is not None:
            return found, how
    alone = _ALONE.match(reply)
    if alone is not None and (alone[1] or alone[2]) in letters:
        return alone[1] or alone[2], "alone"
    same = [letter for letter, option in zip(letters, options, strict=True) if normalised(option) == normalised(reply)]
    return (same[0], "option") if len(same) == 1 else (None, "")


def _letter(text: str, letters: str) -> str | None:
    text = cleaned(text)
    named = _NAMED.match(text)
    found = _LETTER.match(text, named.end() if named else 0)
    letter = next((group for group in found.groups() if group), "").upper() if found else ""
    return letter if letter and letter in letters else None
