"""Two nodes and a directory: what one was given, the other finds; whatever is missing or lies is "no snapshot"."""

from collections.abc import Iterator
from time import monotonic, sleep

import pytest

from deepinfer_kvstore.snapshot_directory import Holder, SnapshotDirectory
from deepinfer_kvstore.snapshot_exchange import QUEUE, SnapshotExchange
from deepinfer_kvstore.snapshot_peers import SnapshotPeers
from deepinfer_kvstore.snapshot_server import SnapshotServer
from deepinfer_kvstore.snapshots import SnapshotRing, digest_of, snapshot_key

TOKEN = "a token"
PAYLOAD = bytes(range(256)) * 100


def key_of(number: int) -> bytes:
    return snapshot_key(bytes(32), 0, number.to_bytes(32, "big"))


class Node:
    """An engine's ring, its server, and its part in the exchange."""

    def __init__(self, directory: str) -> None:
        self.ring = SnapshotRing(1 << 20)
        self.server = SnapshotServer(("127.0.0.1", 0), TOKEN, ring=self.ring, insecure=True)
        self.peers = SnapshotPeers(TOKEN, timeout_seconds=30)
        self.exchange = SnapshotExchange(self.ring, self.peers, directory, f"127.0.0.1:{self.server.port}")

    def search(self, *numbers: int) -> bool:
        future = self.exchange.search([(key_of(number), len(PAYLOAD)) for number in numbers])
        assert future is not None
        return future.result(60)

    def close(self) -> None:
        self.exchange.close()
        self.server.close()


@pytest.fixture
def directory() -> SnapshotDirectory:
    return SnapshotDirectory()


@pytest.fixture
def address(directory: SnapshotDirectory) -> Iterator[str]:
    """Where the directory is served, as by the daemon's role."""
    server = SnapshotServer(("127.0.0.1", 0), TOKEN, directory=directory, insecure=True)
    yield f"127.0.0.1:{server.port}"
    server.close()


@pytest.fixture
def nodes(address: str) -> Iterator[tuple[Node, Node]]:
    pair = Node(address), Node(address)
    yield pair
    for node in pair:
        node.close()


def give(node: Node, directory: SnapshotDirectory, number: int) -> None:
    assert node.ring.put(key_of(number), PAYLOAD, b"s")
    node.exchange.announce(key_of(number))
    deadline = monotonic() + 60
    while directory.locate([key_of(number)]) is None:
        assert monotonic() < deadline
        sleep(0.01)


def test_what_one_node_took_another_finds(nodes: tuple[Node, Node], directory: SnapshotDirectory) -> None:
    one, other = nodes
    give(one, directory, 1)
    assert other.search(3, 2, 1)
    assert other.ring.get(key_of(1)) == PAYLOAD
    assert other.peers.counts() == {"fetched": 1}
    found = directory.locate([key_of(1)])
    assert found is not None and found[1].address == f"127.0.0.1:{other.server.port}"  # it holds it too, more freshly
    assert not other.search(1)  # its own is no other node's


def test_holder_that_is_gone_is_forgotten(nodes: tuple[Node, Node], directory: SnapshotDirectory) -> None:
    one, other = nodes
    give(one, directory, 1)
    one.server.close()
    assert not other.search(1)
    assert directory.locate([key_of(1)]) is None
    assert other.ring.get(key_of(1)) is None


def test_what_is_not_as_announced_is_not_kept(nodes: tuple[Node, Node], directory: SnapshotDirectory) -> None:
    one, other = nodes
    give(one, directory, 1)
    address = f"127.0.0.1:{one.server.port}"
    directory.announce(key_of(1), Holder(address, len(PAYLOAD), digest_of(key_of(2), PAYLOAD), 60.0))
    assert not other.search(1)
    directory.announce(key_of(1), Holder(address, len(PAYLOAD) + 1, digest_of(key_of(1), PAYLOAD), 60.0))
    assert not other.search(1)
    assert other.peers.counts() == {"corrupt": 1, "wrong_length": 1}
    assert key_of(1) not in other.ring


def test_without_a_directory_there_is_no_snapshot() -> None:
    node = Node("127.0.0.1:1")
    assert not node.search(1)
    node.exchange.announce(key_of(1))
    node.close()
    assert node.exchange.search([]) is None
    assert node.peers.counts() == {"directory_failed": 1}


def test_more_searches_than_there_is_room_for_are_dropped(address: str) -> None:
    node = Node(address)
    for _ in range(QUEUE):
        node.exchange._room.acquire()
    assert node.exchange.search([(key_of(1), 1)]) is None
    for _ in range(QUEUE):
        node.exchange._room.release()
    assert not node.search(1)
    node.close()
