"""Where in a reply its final answer stands: after the reasoning, in a box, or after "answer is"."""

import re
from collections.abc import Iterator

REASONING_BEGINS, REASONING_ENDS = "<think>", "</think>"

MAX_ANSWER = 1000

_BRACES = re.compile(r"\\(?:boxed|fbox)\s{0,8}\{|\\.|[{}]", re.DOTALL)
_MARKER = re.compile(
    r"(?:\banswer\b[\s*_]{0,8}(?:\bis\b|[:=：])|答案\s{0,8}(?:是|为|[:：])|####)[\s*_:]{0,8}", re.IGNORECASE
)


def without_reasoning(reply: str, begun: bool) -> str | None:
    """What follows the first </think>. `begun`: the prompt ended inside the reasoning, as a thinking model's does.

    None where the reasoning was begun, there or by the reply itself, and does not end: then there is no answer.
    """
    reasoning, end, answer = reply.partition(REASONING_ENDS)
    if end:
        return answer
    return None if begun or reasoning.lstrip().startswith(REASONING_BEGINS) else reply


def boxed(text: str) -> str | None:
    """The content of the last complete \\boxed{...}, whose braces are balanced; None without one."""
    opened: list[int | None] = []  # where a box's content begins; None for other braces
    content = None
    for brace in _BRACES.finditer(text):
        if brace[0] == "{":
            opened.append(None)
        elif brace[0] == "}":
            start = opened.pop() if opened else None
            if start is not None:
                content = text[start : brace.start()]
        elif brace[0].endswith("{") and len(brace[0]) > 2:
            opened.append(brace.end())
    return content


def marked(text: str) -> Iterator[str]:
    """The rest of the line after each "answer is", "answer:", "答案是" or "####", the last first.

    It ends where the next begins, and after MAX_ANSWER characters, so that all of them together take linear time.
    """
    end = len(text)
    for marker in reversed(list(_MARKER.finditer(text))):
        yield text[marker.end() : min(end, marker.end() + MAX_ANSWER)].partition("\n")[0]
        end = marker.start()
