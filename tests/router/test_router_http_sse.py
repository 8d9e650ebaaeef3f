"""Events of any bytes over any boundary, against a reader that goes line by line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_router.sse import EventSplitter, EventTooLong

LINES = st.sampled_from(
    [b"data: {}", b"data:", b"data", b": ping", b":", b"event: x", b"id: 1", b"data: \xf0\x9f\x90\x8b", b"database: 1"]
)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
STREAMS = st.lists(st.tuples(st.one_of(LINES, st.just(b""), st.just(b"")), ENDS), max_size=24).map(
    lambda lines: b"".join(line + end for line, end in lines)
)
CUTS = st.lists(st.integers(0, 400), max_size=8)


def lines_of(stream: bytes) -> list[bytes]:
    """Whole lines by the specification: ended by LF, CRLF or CR; a CR at the very end could be half of a CRLF."""
    lines, line, position = [], b"", 0
    while position < len(stream):
        byte = stream[position : position + 1]
        position += 1
        if byte == b"\r":
            if position == len(stream):
                break
            if stream[position : position + 1] == b"\n":
                position += 1
        if byte in (b"\r", b"\n"):
            lines.append(line)
            line = b""
        else:
            line += byte
    return lines


def events_of(stream: bytes) -> list[bytes]:
    """Data of each event that a browser would dispatch, and None of the data buffer's content is lost."""
    events: list[bytes] = []
    data: list[bytes] = []
    for line in lines_of(stream):
        name, _, value = line.partition(b":")
        if not line and data:
            events.append(b"\n".join(data))
        if not line:
            data = []
        elif name == b"data":
            data.append(value.removeprefix(b" "))
    return events


def pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    bounds = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    return [stream[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]


@given(STREAMS, CUTS)
def test_the_splitter_gives_back_the_stream_in_events(stream: bytes, cuts: list[int]) -> None:
    """aibrix#2653, aibrix#2638, routstr#543: tokens lost where an event was split over chunks."""
    splitter = EventSplitter()
    events = [event for piece in pieces(stream, cuts) for event in splitter.feed(piece)]
    assert b"".join(events) + splitter.partial == stream
    assert [data for event in events for data in events_of(event + b"\n\n")] == events_of(stream)


@given(st.lists(st.sampled_from([b"data: a\n\n", b"data: \xe2\x82\xac\n\ndata: b\n\n", b": ping\n\n"]), max_size=9))
def test_a_piece_an_event(stream: list[bytes]) -> None:
    splitter = EventSplitter()
    events = [event for piece in stream for event in splitter.feed(piece)]
    assert b"".join(events) == b"".join(stream) and not splitter.partial
    assert all(event.count(b"\n\n") == 1 for event in events)


def test_every_boundary() -> None:
    stream = 'data: {"a": "€🐋"}\r\n\r\n: ping\r\n\r\nevent: x\ndata: 1\ndata: 2\n\ndata: [DONE]\n\n'.encode()
    for cut in range(len(stream)):
        splitter = EventSplitter()
        events = splitter.feed(stream[:cut]) + splitter.feed(stream[cut:])
        assert len(events) == 4 and b"".join(events) == stream


def test_an_event_without_end() -> None:
    splitter = EventSplitter(100)
    assert splitter.feed(b"data: " + b"x" * 94) == []
    with pytest.raises(EventTooLong, match="more than 100 bytes"):
        splitter.feed(b"x")
