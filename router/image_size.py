"""How large an image is, by the first bytes of its file: PNG, JPEG, GIF and WebP."""

from base64 import b64decode
from collections.abc import Mapping
from struct import unpack_from
from typing import Any

MOST_PIXELS = 100_000_000
"""What an image counts as at most, whatever its file says."""
_HEAD_CHARS = 1 << 16
"""Of base64: a JPEG's size comes behind its metadata."""
_MOST_SEGMENTS = 100


def pixels(part: Mapping[str, Any]) -> int:
    """Of a content part of any API; 0: it is elsewhere, or its file is of another kind."""
    text = _base64(part)
    try:
        width, height = _size(b64decode(text[:_HEAD_CHARS]))
    except (ValueError, LookupError):  # no base64, or a file that ends too soon
        return 0
    return min(width * height, MOST_PIXELS)


def _base64(part: Mapping[str, Any]) -> str:
    """The file, where it is in the request: of a data URL (OpenAI), or as `data` (Anthropic)."""
    where = part.get("image_url") or part.get("source")
    if isinstance(where, dict):
        where = where.get("url") or where.get("data")
    if not isinstance(where, str):
        return ""
    if not where.startswith("data:"):
        return "" if "://" in where[:16] else where
    start = where.find(";base64,", 0, 128)
    return where[start + 8 :] if start >= 0 else ""


def _size(head: bytes) -> tuple[int, int]:
    """Width and height; zeros: another kind of file. Raises IndexError, ValueError: it ends before them."""
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return _numbers(">II", head, 16)
    if head.startswith((b"GIF87a", b"GIF89a")):
        return _numbers("<HH", head, 6)
    if head.startswith(b"\xff\xd8"):
        return _of_jpeg(head)
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return _of_webp(head)
    return 0, 0


def _of_jpeg(head: bytes) -> tuple[int, int]:
    """In the first start of a frame (ITU-T T.81, B.2.2)."""
    at = 2
    for _ in range(_MOST_SEGMENTS):
        start, marker = head[at], head[at + 1]
        if start != 0xFF:
            break
        if marker == 0xFF:  # fills up
            at += 1
            continue
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = _numbers(">HH", head, at + 5)
            return width, height
        at += 2 + int.from_bytes(head[at + 2 : at + 4], "big")
    return 0, 0


def _of_webp(head: bytes) -> tuple[int, int]:
    """In the first chunk, which has three forms (RFC 9649)."""
    kind = head[12:16]
    if kind == b"VP8X":
        width, high, height, higher = _numbers("<HBHB", head, 24)
        return 1 + width + (high << 16), 1 + height + (higher << 16)
    if kind == b"VP8L":
        (bits,) = _numbers("<I", head, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = _numbers("<HH", head, 26)
    return width & 0x3FFF, height & 0x3FFF


def _numbers(form: str, head: bytes, at: int) -> tuple[Any, ...]:
    if len(head) < at + 8:
        raise IndexError(at)
    return unpack_from(form, head, at)
