"""Writes that wait for the end of a turn: the same bytes as without, in the same order, and soon for who is alone."""

import asyncio
import contextlib
import socket
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_router.outgoing import Outgoing, Turn

PIECE = st.binary(min_size=1, max_size=50)
STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.one_of(
            st.tuples(st.just("write"), PIECE),
            st.tuples(st.just("writelines"), st.lists(PIECE, min_size=1, max_size=3)),
            st.tuples(st.sampled_from(["write_eof", "close", "abort", "end of turn"]), st.none()),
        ),
    ),
    max_size=25,
)


async def sent(steps: list[tuple[int, tuple[str, Any]]], turn: Turn | None) -> list[bytes]:
    """What each of three peers read of `steps`, each a socket's number and what is done with its transport."""
    loop = asyncio.get_running_loop()
    transports: list[asyncio.Transport] = []
    peers = []
    for _ in range(3):
        ours, theirs = socket.socketpair()
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
        transports.append(transport if turn is None else Outgoing(transport, turn))
        peers.append(theirs)
    over = set()
    for number, (verb, argument) in steps:
        if verb == "end of turn":
            await asyncio.sleep(0)
        elif number not in over:
            getattr(transports[number], verb)(*(() if argument is None else (argument,)))
            if not verb.startswith("write") or verb == "write_eof":
                over.add(number)
    for transport in transports:
        transport.close()
    for _ in range(3):
        await asyncio.sleep(0)
    found = []
    for peer in peers:
        peer.setblocking(True)
        pieces = []
        with contextlib.suppress(ConnectionError):
            while piece := peer.recv(1 << 16):
                pieces.append(piece)
        found.append(b"".join(pieces))
        peer.close()
    return found


@settings(deadline=None, max_examples=60)
@given(STEPS, st.integers(0, 5))
def test_peers_read_what_they_would_have_read(steps: list[tuple[int, tuple[str, Any]]], at_once: int) -> None:
    async def run() -> None:
        turn = Turn(asyncio.get_running_loop())
        turn.at_once = at_once
        assert await sent(steps, turn) == await sent(steps, None)

    uvloop.run(run())


class Wire(asyncio.Transport):
    """Notes what is written."""

    def __init__(self, log: list[bytes], fails: bool = False) -> None:
        self.log = log
        self.fails = fails
        self.closing = False

    def write(self, data: Any) -> None:
        if self.fails:
            raise RuntimeError("no")
        self.log.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return 7


async def together(turn: Turn, log: list[bytes], count: int) -> None:
    """One turn in which `count` sockets are written to; then it has ended."""
    before = len(log)
    for number in range(count):
        Outgoing(Wire(log), turn).write(b"%d" % number)
    await asyncio.sleep(0)
    assert log[before:] == [b"%d" % number for number in range(count)]


def test_writes_of_a_turn_go_out_at_its_end_in_their_order() -> None:
    async def run() -> None:
        log: list[bytes] = []
        turn = Turn(asyncio.get_running_loop())
        first, second = Outgoing(Wire(log), turn), Outgoing(Wire(log), turn)
        first.write(b"a")
        second.write(b"b")
        first.write(b"c")
        assert not log
        assert (first.get_write_buffer_size(), second.get_write_buffer_size()) == (2 + 7, 1 + 7)
        await asyncio.sleep(0)
        assert log == [b"ac", b"b"]
        assert first.get_write_buffer_size() == 7

    uvloop.run(run())


def test_who_is_alone_waits_ever_more_rarely_until_there_is_company() -> None:
    async def run() -> None:
        log: list[bytes] = []
        turn = Turn(asyncio.get_running_loop())
        wire = Outgoing(Wire(log), turn)
        waits = []
        for number in range(1000):
            wire.write(b"x")
            if len(log) == number:
                waits.append(number)
                await asyncio.sleep(0)
        assert waits == [0, 2, 5, 10, 19, 36, 69, 134, 263, 520, 777]
        turn.at_once = 0
        await together(turn, log, 2)
        assert turn.at_once == 0
        await together(turn, log, 1)
        assert turn.at_once == 1

    uvloop.run(run())


@pytest.mark.parametrize("broken", ["closing", "fails"])
def test_one_that_cannot_be_written_to_holds_up_no_other(broken: str) -> None:
    async def run() -> None:
        log: list[bytes] = []
        turn = Turn(asyncio.get_running_loop())
        wire = Wire(log, fails=broken == "fails")
        Outgoing(wire, turn).write(b"lost")
        Outgoing(Wire(log), turn).write(b"kept")
        wire.closing = broken == "closing"
        await asyncio.sleep(0)
        assert log == [b"kept"]

    uvloop.run(run())
