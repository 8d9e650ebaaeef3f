"""What an engine says that a request used, found in the bytes of its answer without parsing it."""

import re
from typing import NamedTuple

MARK = b'"usage":'
_TOKENS = re.compile(rb'"(?:prompt|input)_tokens": ?(\d+)(?:.*?"(?:completion|output)_tokens": ?(\d+))?', re.DOTALL)
_ANSWER = re.compile(rb'"(?:completion|output)_tokens": ?(\d+)')
_CACHED = re.compile(rb'("cached_tokens": ?)\d+')


class Usage(NamedTuple):
    """Tokens, as an engine counted them."""

    prompt_tokens: int
    completion_tokens: int


def find_usage(data: bytes) -> Usage | None:
    """The last usage in an answer's end, or in the events that carry it; None: there is none.

    Of the OpenAI APIs, and of Anthropic's and Responses', which have other names for the same.
    """
    at = data.rfind(MARK)
    if at < 0:
        return None
    found = _TOKENS.search(data, at)
    if found is None:
        return None
    prompt, answer = found.groups()
    if answer is None and (before := _ANSWER.search(data, at)) is not None:
        answer = before[1]
    return Usage(int(prompt), int(answer or 0))


def with_cached(data: bytes, cached_tokens: int) -> bytes:
    """The answer with this number of cached tokens in its last usage: of a split request the prefill's is true.

    The decode engine has all of the prompt from somewhere, and counts that as cached.
    """
    at = data.rfind(MARK)
    if at < 0:
        return data
    return data[:at] + _CACHED.sub(rb"\g<1>%d" % cached_tokens, data[at:], count=1)
