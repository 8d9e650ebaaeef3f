"""The integer that a piece of text states, if it states one."""

import re
import unicodedata

NUMBER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")
_LATEX_SPACES = re.compile(r"\\[,!;: ]")
_LATEX_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s?\{([^{}]*)\}")
_LATEX_OPERATORS = {r"\times": "×", r"\cdot": "×", r"\div": "÷", r"\pm": "±"}
_CONTINUES = re.compile(r"\s*[/^×÷±=+]|\s*\*{1,2}\s*[0-9(]|[,.]?[0-9]|\s+[0-9]|\s*-\s*[0-9]|[eExX][-+0-9]")
"""After a number: it is a part of something larger."""
_PRECEDES = " \t$*_([{~≈"
"""Before a number: currency, emphasis, brackets."""


def canonical(number: str) -> str | None:
    """`number`, of the form of NUMBER, as decimal digits without leading zeros; None if it is no integer.

    A string, since replies may have more digits than Python converts.
    """
    whole, _, fraction = number.replace(",", "").partition(".")
    if fraction.strip("0"):
        return None
    digits = whole.lstrip("+-").lstrip("0") or "0"
    return f"-{digits}" if whole.startswith("-") and digits != "0" else digits


def cleaned(text: str) -> str:
    """Digits of every width and sign as ASCII has them, and no LaTeX around them."""
    text = unicodedata.normalize("NFKC", text).replace("\u2212", "-").replace("{,}", ",")
    text = _LATEX_TEXT.sub(r" \1", _LATEX_SPACES.sub("", text))
    for name, sign in _LATEX_OPERATORS.items():
        text = text.replace(name, sign)
    return text.replace("\\$", "").replace("\\%", "").replace("\\(", "").replace("\\)", "")


def stated(text: str) -> str | None:
    """The integer that a short text such as "42 apples", "$1{,}234", "x = 42" states; canonical.

    The number it begins with, else the one that what follows its last "=" begins with, else its only number. None for
    fractions, powers and several numbers.
    """
    text = cleaned(text)
    for part in (text, text.rpartition("=")[2]):
        begun = part.lstrip(_PRECEDES)
        number = NUMBER.match(begun)
        if number is not None and not _CONTINUES.match(begun, number.end()):
            return canonical(number[0])
    numbers = list(NUMBER.finditer(text))
    if len(numbers) != 1 or "\\" in text:  # with \sqrt, \frac, ... a number is not what it seems
        return None
    before, (start, end) = text[: numbers[0].start()], numbers[0].span()
    if _CONTINUES.match(text, end) or before.rstrip()[-1:] in (*"+-*/^×÷±_",) or text[start - 1 : start].isalpha():
        return None
    return canonical(numbers[0][0])


def last(text: str) -> str | None:
    """The last number of a text, canonical; None where there is none, or it is no integer."""
    found = None
    text = cleaned(text)
    for match in NUMBER.finditer(text):
        found = match
    return None if found is None or _CONTINUES.match(text, found.end()) else canonical(found[0])
