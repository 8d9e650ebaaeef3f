"""Compressed request bodies, read so that policies see what engines will."""

import asyncio
import zlib

from deepinfer_router.errors import Refusal

_WINDOWS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}


async def decoded(body: bytes, coding: bytes, limit: int) -> bytes:
    """`body` without its content-encoding, off the event loop.

    Raises:
        Refusal: 415 for a coding other than gzip and deflate, 413 beyond `limit` bytes, 400 for what is not so coded.
    """
    window = _WINDOWS.get(coding.lower())
    if window is None:
        if coding.lower() == b"identity":
            return body
        raise Refusal(415, "content_encoding", f"Content-Encoding {coding[:50]!r}: gzip and deflate are read")
    return await asyncio.get_running_loop().run_in_executor(None, inflated, body, window, limit)


def inflated(body: bytes, window: int, limit: int) -> bytes:
    """`body` inflated, at most `limit` bytes of memory beside it. Raises Refusal."""
    stream = zlib.decompressobj(window)
    try:
        plain = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise Refusal(400, "content_encoding", f"the body is not what its Content-Encoding says: {error}") from None
    if len(plain) > limit:
        raise Refusal(413, "body_too_large", f"the body has more than {limit} bytes when decompressed")
    if not stream.eof or stream.unused_data:
        raise Refusal(400, "content_encoding", "the compressed body is cut short, or goes on behind its end")
    return plain
