"""The file of costs: engines that write at once lose nothing of each other, and one that is killed spoils nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import special_files
from deepinfer_costmodel.cost import Cost
from deepinfer_costmodel.step import StepCost
from deepinfer_costmodel.step_table import StepTable, read_step_table
from deepinfer_vllm.scheduling import costs_file
from deepinfer_vllm.scheduling.costs import Costs
from deepinfer_vllm.scheduling.costs_file import rewrite

COST = StepCost(Cost(0.004, 3e-5, 2e-9), 0.003, 1e-4, 1e-8, 4e-5)

ENGINE = """
import sys
from pathlib import Path
from deepinfer_costmodel.step import Load
from deepinfer_vllm.scheduling.costs import Costs

path, mode, times = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
costs = Costs(mode, None, str(path), mode, sys.exit)
for number in range(times):
    costs.observe(Load(decodes=1), 0.01, 0.01)
    costs.write()
    held = costs._read()
    assert held is not None and held.sources[mode] == f"{mode}; fitted to {number + 1} steps", (number, held)
"""
"""One that writes after every step, and looks whether that is there."""

KILLED = """
import os, signal, sys
from pathlib import Path
from deepinfer_costmodel.step import Load
from deepinfer_vllm.scheduling.costs import Costs

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

write = Path.write_text

def torn(self, text):
    write(self, text[: len(text) // 2])
    die()

if sys.argv[2] == "while the draft is written":
    Path.write_text = torn
else:
    Path.replace = die
costs = Costs("full", None, sys.argv[1], "killed", sys.exit)
costs.observe(Load(decodes=1), 0.01, 0.01)
costs.write()
"""


def told(text: str) -> Callable[[], StepTable]:
    return lambda: StepTable({"full": COST}, {"full": text})


def call(program: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program, *words], stderr=subprocess.PIPE, text=True)


def test_engines_that_write_at_once_keep_each_others_sets(tmp_path: Path) -> None:
    path, times = tmp_path / "costs.json", 150
    engines = [call(ENGINE, str(path), f"mode {number}", str(times)) for number in range(3)]
    for engine in engines:
        assert engine.communicate(timeout=120)[1] == "" and engine.returncode == 0
    found = read_step_table(path)
    assert found.sources == {f"mode {number}": f"mode {number}; fitted to {times} steps" for number in range(3)}
    assert {file.name for file in tmp_path.iterdir()} == {"costs.json", ".costs.json.lock"}


@pytest.mark.parametrize("when", ["while the draft is written", "before it takes its place"])
def test_one_that_is_killed_spoils_nothing_and_holds_up_nobody(tmp_path: Path, when: str) -> None:
    path = tmp_path / "costs.json"
    rewrite(path, told("before"))
    for _ in range(2):
        engine = call(KILLED, str(path), when)
        assert engine.communicate(timeout=60)[1] == "" and engine.returncode == -signal.SIGKILL
        assert read_step_table(path).sources == {"full": "before"}
    assert len(list(tmp_path.iterdir())) == 4  # two drafts
    rewrite(path, told("after"))
    assert read_step_table(path).sources == {"full": "after"}
    assert {file.name for file in tmp_path.iterdir()} == {"costs.json", ".costs.json.lock"}


def test_threads_take_turns_too(tmp_path: Path) -> None:
    """An engine's own thread and its end."""
    path = tmp_path / "costs.json"
    sources = ["s" * length for length in (1, 1 << 10, 1 << 18)]

    def write(source: str) -> None:
        for _ in range(50):
            rewrite(path, told(source))
            assert read_step_table(path).sources["full"] in sources

    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(write, source) for source in sources]:
            done.result()


def test_a_writer_that_does_not_end_is_not_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs_file, "PATIENCE_SECONDS", 0.05)
    path, said = tmp_path / "costs.json", []
    with costs_file._turn(path):
        costs = Costs("full", None, str(path), "another", said.append)
        costs._put(COST, 1)
    assert said == [
        f"costs of steps are not written: [Errno 110] another writer does not end: '{path.parent}/.costs.json.lock'"
    ]
    costs._put(COST, 2)
    assert read_step_table(path).sources == {"full": "another; fitted to 2 steps"} and len(said) == 1


@pytest.mark.parametrize("kind", special_files.KINDS)
def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path, kind: str) -> None:
    """In place of /dev/null a file would be bad for the whole machine."""
    path = tmp_path / "costs.json"
    special_files.put(path, kind)
    with pytest.raises(OSError, match="no regular file"):
        rewrite(path, told("a test"))
    assert list(tmp_path.iterdir()) == [path] and not path.is_file()


def test_what_a_link_names_is_replaced_and_not_the_link(tmp_path: Path) -> None:
    """Two names of a file have one lock."""
    shared, link = tmp_path / "shared/costs.json", tmp_path / "own.json"
    shared.parent.mkdir()
    link.symlink_to(shared)
    rewrite(link, told("by its link"))
    assert link.is_symlink() and read_step_table(shared).sources == {"full": "by its link"}
    with costs_file._turn(shared), pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs_file, "PATIENCE_SECONDS", 0.05)
        with pytest.raises(TimeoutError):
            rewrite(link, told("meanwhile"))


def test_only_drafts_are_cleared_away(tmp_path: Path) -> None:
    path, others = (
        tmp_path / "costs.json",
        [".costs.json-backup", ".costs.json-0123456789abcdef0", "x-0123456789abcdef"],
    )
    for name in (*others, ".costs.json-0123456789abcdef"):
        (tmp_path / name).touch()
    rewrite(path, told("a test"))
    assert {file.name for file in tmp_path.iterdir()} == {"costs.json", ".costs.json.lock", *others}


def test_without_locks_it_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some clusters' file systems. Another's draft is left then: its writer may be at it."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    path, draft = tmp_path / "costs.json", tmp_path / ".costs.json-0123456789abcdef"
    draft.touch()
    rewrite(path, told("a test"))
    assert read_step_table(path).sources == {"full": "a test"} and draft.exists()


def test_a_lock_of_another_user_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, opened = tmp_path / "costs.json", os.open

    def mine_to_read(file: Any, flags: int, *more: Any, **named: Any) -> int:
        if str(file).endswith(".lock") and flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return opened(file, flags, *more, **named)

    rewrite(path, told("theirs"))
    monkeypatch.setattr(os, "open", mine_to_read)
    rewrite(path, told("mine"))
    assert read_step_table(path).sources == {"full": "mine"}
    monkeypatch.setattr(costs_file, "PATIENCE_SECONDS", 0.05)
    with costs_file._turn(path), pytest.raises(TimeoutError):
        rewrite(path, told("meanwhile"))


def test_a_pipe_in_place_of_the_lock_holds_up_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".costs.json.lock")
    with pytest.raises(OSError, match="is no regular file"):
        rewrite(tmp_path / "costs.json", told("a test"))
