"""Command lines and settings as files may keep them: without API keys, tokens and passwords.

What is secret is told by names: of flags, of HTTP headers, of keys in JSON. Light: loads nothing else of this package.
"""

import json
import re
import shlex
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

HIDDEN = "***"
_ANYWHERE = frozenset(
    ("apikey", "apikeys", "auth", "authorization", "bearer", "cookie", "credential", "credentials", "jwt")
    + ("passphrase", "passwd", "password", "secret", "secrets")
)
_LAST = _ANYWHERE | {"key", "sig", "signature", "token"}
"""Of a name; in front of something else they are none: `stop_token_ids`."""
_FLAG = re.compile(r"(--[\w.-]+)(?:=(.*))?", re.DOTALL)
_NAMED = re.compile(r"([\w.-]+)=(.*)", re.DOTALL)
_HEADER = re.compile(r"([\w-]+)\s*:(?!//)\s*(?=\S)", re.ASCII)
_HEADERS = re.compile(r"--([\w-]+-)?headers?")
_USER = re.compile(r"(?<=://)[^/?#\s]*@")
_QUERY = re.compile(r"(?<=[?&;])([\w.-]+)=[^&;#\s]+")
_BEARER = re.compile(r"(?<=\bbearer )\s*\S+", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether what has this name is: `--api-key`, `X-Auth-User`, `hfToken`; not `stop_token_ids`, `secret_file`."""
    spread = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()
    *parts, last = re.findall(r"[a-z0-9]+", spread) or [""]
    return last in _LAST or (last not in ("file", "path") and not _ANYWHERE.isdisjoint(parts))


def hidden(value: Any) -> Any:
    """A value of JSON in which `HIDDEN` stands for what has a secret's name, at any depth and in strings that are
    command lines, in lists of their words, in URLs and headers."""
    if isinstance(value, dict):
        return {name: HIDDEN if is_secret(name) and held else hidden(held) for name, held in value.items()}
    if isinstance(value, list | tuple):
        if all(isinstance(each, str) for each in value):
            return hidden_words(value)
        return [hidden(each) for each in value]
    return _value("", value) if isinstance(value, str) else value


def hidden_words(words: Sequence[str]) -> list[str]:
    """The words of a command line, with `HIDDEN` for values of secret flags, headers, keys of JSON and parts of URLs,
    also inside words that are command lines themselves. Of other headers a digest is left: enough to see that one is
    another."""
    flag, found = "", []
    for word in words:
        if given := _FLAG.fullmatch(word):
            flag, value = given.groups()
            found.append(word if value is None else f"{flag}={_value(flag, value)}")
            flag = flag if value is None else ""
        else:
            found.append(_value(flag, word))
    return found


def hidden_line(line: str) -> str:
    """The same of a whole command line; as it was where nothing is hidden."""
    try:
        words = shlex.split(line)
    except ValueError:  # a quotation does not end
        words = line.split()
    kept = hidden_words(words)
    return line if kept == words else shlex.join(kept)


def _value(flag: str, word: str) -> str:
    if is_secret(flag):
        return HIDDEN
    if word.lstrip()[:1] in ("{", "["):
        try:
            value = json.loads(word)
            kept = hidden(value)
        except (ValueError, RecursionError):
            return _within(word)
        return word if kept == value else json.dumps(kept)
    if named := _NAMED.fullmatch(word):
        name, value = named.groups()
        if is_secret(name):
            return f"{name}={HIDDEN}"
        if _HEADERS.fullmatch(flag):
            return f"{name}=sha256:{sha256(value.encode(errors='surrogateescape')).hexdigest()[:12]}"
        return f"{name}={_value('', value)}"
    if _HEADERS.fullmatch(flag):  # of another form than vLLM's
        return HIDDEN
    if (header := _HEADER.match(word)) and is_secret(header[1]):
        return f"{header[0]}{HIDDEN}"
    if len(word.split()) > 1:
        word = hidden_line(word)
    return _within(word)


def _within(text: str) -> str:
    """Of a text that is none of the above, without what URLs and headers in it carry."""
    text = _USER.sub(f"{HIDDEN}@", text)
    text = _QUERY.sub(lambda pair: f"{pair[1]}={HIDDEN}" if is_secret(pair[1]) else pair[0], text)
    return _BEARER.sub(HIDDEN, text)
