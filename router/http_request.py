"""Reads one request off a connection: llhttp judges its head and its chunks, and never sees the next request.

A head, and a chunked body, end with CRLF CRLF and nowhere else. So llhttp is fed up to each of those, and where it says
that the message is complete, the rest belongs to the next. It reads without leniency: both lengths, two lengths, folded
lines, bare LF, spaces before a colon are refused.
"""

from types import SimpleNamespace

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from deepinfer_router.errors import Refusal
from deepinfer_router.http_headers import Headers

END = b"\r\n\r\n"
_FRAMING = frozenset(
    (
        b"connection",
        b"content-encoding",
        b"content-length",
        b"expect",
        b"host",
        b"transfer-encoding",
        b"upgrade",
    )
)
_FRAMING_BYTES = 64 << 10
"""Of a chunked body that llhttp may read beyond 8 for each of its own: a chunk of one byte has 5 of framing."""


class Request:
    """One request's head, and its body while it comes."""

    __slots__ = (
        "url",
        "method",
        "headers",
        "framing",
        "http_1_0",
        "keep_alive",
        "length",
        "pieces",
        "size",
        "complete",
        "_parser",
        "_seam",
        "_fed_bytes",
        "_head_read",
    )

    def __init__(self, head: bytes) -> None:
        """`head`: up to and with its CRLF CRLF. Raises Refusal: it is none, or is ambiguous about where it ends."""
        self.url = b""
        self.headers: Headers = []
        self.framing: dict[bytes, bytes] = {}
        """Values of headers that concern the connection or the body; of repeated ones with a comma between."""
        self.keep_alive = False
        self.pieces: list[bytes] = []
        self.size = 0
        """Bytes of the body so far."""
        self.complete = False
        self._seam = b""
        self._fed_bytes = 0
        self._head_read = False
        parser = HttpRequestParser(self)
        self._parser = parser
        try:
            parser.feed_data(head)
        except HttpParserUpgrade:  # it would take what follows for another protocol
            body_only = SimpleNamespace(on_body=self.on_body, on_message_complete=self.on_message_complete)
            self._parser = HttpRequestParser(body_only)
            self._parser.feed_data(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
        except HttpParserError as error:
            raise _bad(str(error)) from None
        self.method: bytes = parser.get_method()
        self._check(head)
        if self.length is not None:
            self._parser = None  # which refers to this

    def feed(self, data: bytes) -> bytes | None:
        """More of the body; what comes behind its end, or None: it goes on. Raises Refusal: it is not well framed."""
        if self.length is None:
            return self._feed_chunks(data)
        missing = self.length - self.size
        if len(data) < missing:
            self.pieces.append(data)
            self.size += len(data)
            return None
        self.pieces.append(data[:missing])
        self.size = self.length
        self.complete = True
        return data[missing:]

    def body(self) -> bytes:
        """All of it, once it has ended."""
        return self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)

    def path(self) -> bytes:
        """Path and query of its target. Raises Refusal: it has none."""
        url = self.url
        if url.startswith(b"/") or (url == b"*" and self.method == b"OPTIONS"):
            return url
        scheme, found, rest = url.partition(b"://")
        if found and scheme.lower() in (b"http", b"https"):
            slash = rest.find(b"/")
            return rest[slash:] if slash >= 0 else b"/"
        raise _bad(f"target {url[:80]!r}: a path is read, such as /v1/chat/completions")

    def upgrade(self) -> bytes | None:
        """b"websocket", if it asks to change to that. Other changes (h2c) are declined by answering as usual."""
        names = [name.strip() for name in self.framing.get(b"connection", b"").lower().split(b",")]
        asks = b"upgrade" in names and self.method == b"GET" and self.length == 0 and not self.http_1_0
        return b"websocket" if asks and self.framing[b"upgrade"].lower() == b"websocket" else None

    def _feed_chunks(self, data: bytes) -> bytes | None:
        self._fed_bytes += len(data)
        start = 0
        while start < len(data):
            end = self._next_end(data, start)
            try:
                self._parser.feed_data(data[start:end])
            except HttpParserError as error:
                raise _bad(str(error)) from None
            if self.complete:
                self._parser = None
                return data[end:]
            start = end
        if self._fed_bytes > 8 * self.size + _FRAMING_BYTES:
            raise _bad("chunks, or trailers, of far more framing than body")
        self._seam = (self._seam + data[-3:])[-3:]
        return None

    def _next_end(self, data: bytes, start: int) -> int:
        """Behind the next CRLF CRLF, which may have begun in earlier data."""
        if start == 0 and self._seam:
            across = (self._seam + data[:3]).find(END)
            if across >= 0:
                return across + len(END) - len(self._seam)
        end = data.find(END, start)
        return len(data) if end < 0 else end + len(END)

    def _check(self, head: bytes) -> None:
        framing = self.framing
        line_end = head.find(b"\r\n")
        self.http_1_0 = head.endswith(b" HTTP/1.0", 0, line_end)
        if not self.http_1_0 and not head.endswith(b" HTTP/1.1", 0, line_end):
            raise Refusal(505, "http_version", "only HTTP/1.1 and HTTP/1.0 are spoken here")
        host = framing.get(b"host")
        if not self.http_1_0 and (host is None or b"," in host):
            raise _bad("there must be one Host header")
        coding = framing.get(b"transfer-encoding")
        self.length: int | None
        """Of the body; None: it comes in chunks."""
        if coding is None:
            self.length = int(framing[b"content-length"]) if b"content-length" in framing else 0
            self.complete = self.length == 0
        elif self.http_1_0:
            raise _bad("Transfer-Encoding in HTTP/1.0")
        elif coding.lower() != b"chunked":
            raise Refusal(501, "transfer_encoding", f"Transfer-Encoding {coding[:50]!r}: only chunked is read")
        else:
            self.length = None
            self.complete = False

    # llhttp's

    on_message_begin = on_chunk_header = on_chunk_complete = None  # absent, the parser would have an exception for each

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_read:
            return  # a trailer, which must not pass for a header
        name = name.lower()
        self.headers.append((name, value))
        if name in _FRAMING:
            framing = self.framing
            framing[name] = framing[name] + b"," + value if name in framing else value

    def on_headers_complete(self) -> None:
        self._head_read = True
        self.keep_alive = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        self.pieces.append(data)
        self.size += len(data)

    def on_message_complete(self) -> None:
        self.complete = True


def _bad(reason: str) -> Refusal:
    return Refusal(400, "bad_request", f"not a request that can be read: {reason}")
