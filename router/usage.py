"""What an engine says that a request used, found in the bytes of its answer without parsing it."""

import re
from typing import NamedTuple

MARK = b'"usage":'
_FIELD = re.compile(rb'"(prompt_tokens|completion_tokens|input_tokens|output_tokens)": ?(\d+)')
_CACHED = re.compile(rb'("cached_tokens": ?)\d+')
_KEEP_BYTES = 4096


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
    found = {name: int(value) for name, value in _FIELD.findall(data, at, at + _KEEP_BYTES)}
    prompt = found.get(b"prompt_tokens", found.get(b"input_tokens"))
    if prompt is None:
        return None
    return Usage(prompt, found.get(b"completion_tokens", found.get(b"output_tokens", 0)))


def with_cached(data: bytes, cached_tokens: int) -> bytes:
    """The answer with this number of cached tokens in its last usage: of a split request the prefill's is true.

    The decode engine has all of the prompt from somewhere, and counts that as cached.
    """
    at = data.rfind(MARK)
    if at < 0:
        return data
    return data[:at] + _CACHED.sub(rb"\g<1>%d" % cached_tokens, data[at:], count=1)
