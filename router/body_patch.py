"""Changes top-level fields of a JSON body.

New fields are put at the end of the bytes that came. Where one is there already the body is written anew from what was
parsed: to look for a field's bytes was measured to take longer than that, at every size.
"""

from collections.abc import Mapping
from typing import Any, Final

import orjson

from deepinfer_router.errors import Refusal


class _Drop:
    """Type of DROP."""

    def __repr__(self) -> str:
        return "DROP"


DROP: Final = _Drop()
"""As a field's new value: the field is taken out."""


def patch(body: bytes, fields: Mapping[str, Any], changes: Mapping[str, Any]) -> bytes:
    """`body` with `changes` made; `fields` is what it says, parsed. Fields that nobody names keep their values.

    Raises:
        Refusal: 400, its objects and arrays nest too deep to be written anew.
    """
    if any(name in fields for name in changes):
        return _write({name: value for name, value in {**fields, **changes}.items() if value is not DROP})
    added = {name: value for name, value in changes.items() if value is not DROP}
    if not added:
        return body
    return b"".join((body[: body.rindex(b"}")], b"," if fields else b"", _write(added)[1:]))


def _write(fields: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(fields)
    except orjson.JSONEncodeError as error:  # what orjson has read it can write, but for depth: to 1024 and to 254
        raise Refusal(400, "invalid_json", f"the body cannot be changed: {error}: nest objects less deep") from error
