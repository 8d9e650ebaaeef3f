"""Images and other media of a conversation, one by one, as an encoder is asked for them."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import orjson
from xxhash import xxh3_128_digest

from deepinfer_router.api import Api

MEDIA = frozenset(("image_url", "input_image", "image", "video_url", "audio_url", "input_audio"))
"""Types of content parts, in all APIs."""
DECIDE_THE_KEY = ("mm_processor_kwargs", "media_io_kwargs")
"""Fields that are part of vLLM's key of an encoding, beside the media themselves."""


def media_parts(api: Api, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parts that are media, in their order, also those within results of tools."""
    found: list[dict[str, Any]] = []
    left: list[Any] = [fields.get(api.prompt)]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += reversed(value)
        elif isinstance(value, dict):
            if value.get("type") in MEDIA:
                found.append(value)
            else:
                left += [value.get("output"), value.get("content")]
    return found


def encoder_body(api: Api, fields: Mapping[str, Any], part: dict[str, Any]) -> bytes:
    """A request for one part alone. Of its answer only `ec_transfer_params` matter."""
    body: dict[str, Any] = {"model": fields["model"]} if "model" in fields else {}
    body[api.prompt] = [{"role": "user", "content": [part]}]
    body[api.max_tokens[-1]] = 1
    body["stream"] = False
    body |= {name: fields[name] for name in DECIDE_THE_KEY if name in fields}
    return orjson.dumps(body)


class Encoded:
    """What encoders have lately said of the media that they encoded. A bounded memory; the event loop's thread."""

    def __init__(self, most: int, keep_s: float) -> None:
        """Remembers the latest `most`, each for `keep_s`: encoders let go of encodings without a word."""
        self._most = most
        self._keep_s = keep_s
        self._known: OrderedDict[bytes, tuple[float, dict[str, Any]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def find(self, body: bytes, now: float) -> dict[str, Any] | None:
        """The `ec_transfer_params` of the request `body` to an encoder; None: it has to be asked."""
        known = self._known.get(key := xxh3_128_digest(body))
        if known is None:
            return None
        if now >= known[0]:
            del self._known[key]
            return None
        return known[1]

    def keep(self, body: bytes, params: dict[str, Any], now: float) -> None:
        """An encoder has answered `body`."""
        if self._most:
            key = xxh3_128_digest(body)
            self._known[key] = now + self._keep_s, params
            self._known.move_to_end(key)
            if len(self._known) > self._most:
                self._known.popitem(last=False)
