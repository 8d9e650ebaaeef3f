"""The supervisor's event loop and the frames of its channels."""

import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_router.channel import Frames, pack, receive
from deepinfer_router.poller import Poller


@pytest.fixture
def poller() -> Iterator[Poller]:
    made = Poller()
    yield made
    made.close()


def test_timers_run_in_their_order(poller: Poller) -> None:
    seen: list[str] = []
    poller.later(0.02, lambda: seen.append("late"))
    poller.later(0.0, lambda: seen.append("first"))
    poller.later(0.0, lambda: seen.append("second"))
    poller.later(0.04, poller.stop)
    poller.run()
    assert seen == ["first", "second", "late"]


def test_what_a_callback_raises_does_not_end_it(poller: Poller, capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise RuntimeError("odd")

    poller.call(fails)
    poller.later(0.01, poller.stop)
    poller.run()
    assert "RuntimeError: odd" in capsys.readouterr().err


def test_other_threads_ask(poller: Poller) -> None:
    thread = threading.Thread(target=poller.run)
    thread.start()
    assert poller.ask(lambda answer: answer(threading.get_ident()), 30.0) == thread.ident
    assert poller.ask(lambda answer: None, 0.01) is None
    poller.call(poller.stop)
    thread.join(30)
    assert not thread.is_alive()


def test_sockets_and_signals(poller: Poller) -> None:
    ours, theirs = socket.socketpair()
    seen: list[bytes] = []

    def readable() -> None:
        seen.append(ours.recv(10))
        poller.forget(ours)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.getsignal(signal.SIGUSR1)
    poller.on_signal(signal.SIGUSR1, poller.stop)
    poller.watch(ours, readable)
    theirs.send(b"hello")
    poller.run()
    signal.signal(signal.SIGUSR1, before)
    assert seen == [b"hello"]
    ours.close()
    theirs.close()


MESSAGES = st.lists(st.dictionaries(st.text(), st.integers(-10, 10) | st.binary() | st.none(), max_size=3), max_size=4)


@given(MESSAGES, st.lists(st.integers(1, 20)))
def test_frames_come_whole_however_they_are_cut(messages: list[dict[str, object]], cuts: list[int]) -> None:
    data = b"".join(map(pack, messages))
    frames, found = Frames(), []
    for cut in cuts:
        found += frames.feed(data[:cut])
        data = data[cut:]
    assert found + frames.feed(data) == messages


def test_one_message_is_read_and_not_a_byte_more() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(pack({"first": 1}) + b"rest")
        assert receive(ours) == {"first": 1}
        assert ours.recv(10) == b"rest"
        theirs.close()
        with pytest.raises(EOFError):
            receive(ours)
