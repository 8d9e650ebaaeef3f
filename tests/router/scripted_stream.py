"""What an engine would stream for given tokens: text as it becomes whole, ids, usage and the end mark, as vLLM 0.32."""

import orjson

from deepinfer_router.api import Kind

VOCABULARY = [b"a", b" word", b"\xe2", b"\x82", b"\xac", b"\n\n", b'"token_ids":[1,2]', b"\xf0\x9f", b"\x98\x80", b""]
"""By token id. Ids 2, 3, 4 are one character, as are 7 and 8; the last is a token without text."""


def pieces(ids: list[int]) -> list[str]:
    """The text that each token adds, as soon as its characters are whole."""
    texts, pending = [], b""
    for token in ids:
        pending += VOCABULARY[token]
        try:
            texts.append(pending.decode())
            pending = b""
        except UnicodeDecodeError:
            texts.append("")
    return texts


def stream(
    kind: Kind,
    prompt: list[int],
    ids: list[int],
    *,
    with_ids: bool,
    name: str = "x-1",
    created: int = 1,
    usage: bool = True,
    finish: str = "length",
) -> list[bytes]:
    """The events of an answer `ids` to `prompt`, one token each."""
    head = {"id": name, "created": created, "model": "m"}
    events = []
    if kind is Kind.CHAT:
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        events.append({**head, "choices": [first], "prompt_token_ids": prompt if with_ids else None})
    for at, (token, text) in enumerate(zip(ids, pieces(ids), strict=True)):
        last = at == len(ids) - 1
        choice = {"index": 0, "logprobs": None, "finish_reason": finish if last else None}
        choice["token_ids"] = [token] if with_ids else None
        if kind is Kind.CHAT:
            choice["delta"] = {"content": text}
        else:
            choice |= {"text": text, "prompt_token_ids": prompt if with_ids and at == 0 else None}
        events.append({**head, "choices": [choice]})
    if usage:
        counts = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        events.append({**head, "choices": [], "usage": counts})
    return [b"data: " + orjson.dumps(event) + b"\n\n" for event in events] + [b"data: [DONE]\n\n"]


def told(events: list[bytes]) -> tuple[str, list[dict[str, int]], bool]:
    """Text, usages and whether the end mark came."""
    text, usages, done = "", [], False
    for event in b"".join(events).split(b"\n\n")[:-1]:
        data = event.removeprefix(b"data: ")
        if data == b"[DONE]":
            done = True
            continue
        chunk = orjson.loads(data)
        if chunk.get("usage"):
            usages.append(chunk["usage"])
        for choice in chunk["choices"]:
            text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    return text, usages, done
