"""One collector per namespace, as long as it lives; none is harmed by two."""

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from deepinfer_kvstore.gc_lease import GcLease

LEASE_S = 0.2


def taken(lease: GcLease, within_s: float = 30.0) -> bool:
    """Ask for the lease until it is ours."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if lease.hold():
            return True
        time.sleep(LEASE_S / 10)
    return False


def test_the_first_holds_and_goes_on_holding(tmp_path: Path) -> None:
    first, second = GcLease(tmp_path, 3600), GcLease(tmp_path, 3600)
    assert first.hold() and first.epoch == 1
    assert not second.hold() and not second.held()
    assert first.hold() and first.held()


def test_a_released_lease_is_free_at_once_and_only_its_holder_can_release_it(tmp_path: Path) -> None:
    first, second = GcLease(tmp_path, 3600), GcLease(tmp_path, 3600)
    assert first.hold()
    second.release()
    assert first.held()
    first.release()
    first.release()
    assert second.hold() and not first.hold()


def test_the_lease_of_a_silent_holder_is_taken_and_its_old_holder_notices(tmp_path: Path) -> None:
    first, second = GcLease(tmp_path, LEASE_S), GcLease(tmp_path, LEASE_S)
    assert first.hold()
    assert taken(second) and second.epoch == 2
    assert not first.held()
    assert not first.hold()


def test_a_holder_that_beats_is_left_alone(tmp_path: Path) -> None:
    """However slow the machine: the second takes the lease only if the first was silent for all of lease_s."""
    first, second = GcLease(tmp_path, 3600), GcLease(tmp_path, 3600)
    assert first.hold()
    for _ in range(20):
        assert first.hold()
        assert not second.hold()


@pytest.mark.parametrize("jump_s", [-1e9, 1e9])
def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    first, second = GcLease(tmp_path, LEASE_S), GcLease(tmp_path, LEASE_S)
    assert first.hold()
    assert not second.hold()
    real = time.time_ns
    monkeypatch.setattr("deepinfer_kvstore.gc_lease.time_ns", lambda: real() + int(jump_s * 1e9))
    assert first.hold()
    assert not second.hold()
    assert taken(second)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[]", b'{"owner": 1}', b"\xff" * 300,
        b'{"owner": "x", "epoch": "?"}', b'{"owner": "x", "epoch": 1e999}',
    ],
)  # fmt: skip
def test_a_file_that_says_nothing_is_a_lease_that_goes_stale(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "gc.lease").write_bytes(text)
    lease = GcLease(tmp_path, LEASE_S)
    assert not lease.hold()
    assert taken(lease) and lease.epoch == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_on_a_full_disk_whoever_can_make_room_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Else nobody could collect, and the disk would stay full."""
    other = GcLease(tmp_path, LEASE_S)
    assert other.hold()

    def full(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    lease = GcLease(tmp_path, LEASE_S)
    with monkeypatch.context() as now:
        now.setattr(Path, "write_text", full)
        assert not lease.hold(), "somebody does"
        other.release()
        assert lease.hold() and lease.hold()
    assert lease.hold() and lease.held()


def test_of_many_that_take_a_stale_lease_at_once_one_holds_it(tmp_path: Path) -> None:
    leases = [GcLease(tmp_path, 0.0) for _ in range(8)]
    GcLease(tmp_path, 0.0).hold()
    for lease in leases:
        lease.hold()  # sees the beat; the next call may take it
    barrier = threading.Barrier(len(leases))

    def take(lease: GcLease) -> None:
        barrier.wait()
        lease.hold()

    threads = [threading.Thread(target=take, args=(lease,)) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(lease.held() for lease in leases) == 1


def test_the_lease_of_a_killed_process_is_taken(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from deepinfer_kvstore.gc_lease import GcLease\n"
        f"print(GcLease(Path(sys.argv[1]), {LEASE_S}).hold(), flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "True\n"
    lease = GcLease(tmp_path, LEASE_S)
    assert not lease.hold()
    process.kill()
    process.wait()
    assert taken(lease)
