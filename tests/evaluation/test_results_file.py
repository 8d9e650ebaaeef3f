"""The file of results: what a killed process leaves, and what it is not continued with."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from deepinfer_vllm.evaluation.errors import EvaluationError
from deepinfer_vllm.evaluation.results_file import ResultsFile

SETTINGS = {"seed": 0, "engine": {"dtype": "float32"}, "temperature": None}


def filled(path: Path, count: int = 3, **settings: Any) -> bytes:
    with ResultsFile(path, {**SETTINGS, **settings}) as results:
        for number in range(count):
            results.append({"id": str(number), "text": "é\n" * number})
    return path.read_bytes()


def refusal(path: Path, settings: dict[str, Any], **more: Any) -> str:
    before = path.read_bytes()
    with pytest.raises(EvaluationError) as caught:
        ResultsFile(path, settings, **more)
    assert path.read_bytes() == before
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_process_killed_at_random_moments_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """Each run is killed some time after its first new line; in the end every item is there once, in order."""
    path, count, rng, kills = tmp_path / "r.jsonl", 3000, Random(7), 0
    command = [sys.executable, str(Path(__file__).with_name("results_writer.py")), str(path), str(count)]
    seen = 0
    while kills < 12:
        process = subprocess.Popen(command)
        size = path.stat().st_size if path.exists() else 0
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if path.exists() and path.stat().st_size > size:
                time.sleep(rng.random() * 0.02)
                process.kill()
                break
            time.sleep(0.001)
        if process.wait() == 0:
            break
        kills += 1
        whole = path.read_bytes().rpartition(b"\n")[0].splitlines()
        assert len(whole) - 1 >= seen
        seen = len(whole) - 1
    assert kills >= 2
    subprocess.run(command, check=True, timeout=120)
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [line["id"] for line in lines[1:]] == [str(number) for number in range(count)]


def test_cut_anywhere_it_holds_the_whole_lines_and_goes_on(tmp_path: Path) -> None:
    content = filled(tmp_path / "whole.jsonl")
    starts = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    for end in range(len(content) + 1):
        path = tmp_path / "cut.jsonl"
        path.write_bytes(content[:end])
        with ResultsFile(path, SETTINGS) as results:
            held = [str(n) for n in range(3) if end >= starts[n + 1]]
            assert list(results.records) == held
            for number in range(len(held), 3):
                results.append({"id": str(number), "text": "é\n" * number})
        assert path.read_bytes() == content


def test_other_settings_are_named(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    filled(path)
    with ResultsFile(path, SETTINGS) as results:
        assert results.records.keys() == {"0", "1", "2"}
    message = refusal(path, {**SETTINGS, "seed": 1, "temperature": 0.5, "engine": {"dtype": "auto"}})
    assert 'engine was {"dtype": "float32"} and is {"dtype": "auto"}; seed was 0 and is 1; ' in message
    assert "temperature was null and is 0.5. Continue with the same, name another --out" in message
    assert "strict was null and is true" in refusal(path, {**SETTINGS, "strict": True})
    with ResultsFile(path, {"seed": 1}, fresh=True) as results:
        assert results.records == {}
    assert len(path.read_bytes().splitlines()) == 1


def test_settings_under_which_nothing_was_answered_may_change(tmp_path: Path) -> None:
    """As after an engine that did not start for one of them."""
    path = tmp_path / "r.jsonl"
    filled(path, 0, seed=1)
    assert filled(path, 1) == filled(tmp_path / "anew.jsonl", 1)


@pytest.mark.parametrize(
    "content", [b"my notes", b"my notes\n", b'{"schema": "other", "x": 1}\n', b"\0\0\0", b"\xff\xfe"]
)
@pytest.mark.parametrize("fresh", [False, True])
def test_what_is_no_file_of_results_stays(tmp_path: Path, content: bytes, fresh: bool) -> None:
    path = tmp_path / "notes"
    path.write_bytes(content)
    assert refusal(path, SETTINGS, fresh=fresh).endswith(
        "holds no results of an evaluation; name another place by --out"
    )


@pytest.mark.parametrize("line", [b"{", b"[]", b'{"text": "no id"}', b'{"id": 3}', b"\0" * 20, b"[" * 100_000])
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "r.jsonl"
    first, second, *rest = filled(path).splitlines(keepends=True)
    path.write_bytes(b"".join([first, second, line + b"\n", *rest]))
    assert "r.jsonl, line 3 is damaged: remove that line" in refusal(path, SETTINGS)


def test_two_runs_do_not_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with ResultsFile(path, SETTINGS):
        assert "another run writes to it" in refusal(path, SETTINGS)
    with ResultsFile(path, SETTINGS):
        pass


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "r.jsonl", tmp_path):
        with pytest.raises(EvaluationError, match="name another place by --out"):
            ResultsFile(path, SETTINGS)


def test_what_is_no_regular_file_is_not_read() -> None:
    with pytest.raises(EvaluationError, match="/dev/zero is no regular file"):
        ResultsFile(Path("/dev/zero"), SETTINGS)


@pytest.mark.parametrize("room", [0, 10])
def test_a_full_disk_leaves_whole_lines(tmp_path: Path, room: int) -> None:
    """The limit on a file's size stands for the disk's: a write is refused, or takes a part."""
    path = tmp_path / "r.jsonl"
    content = filled(path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ResultsFile(path, SETTINGS) as results:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) + room, before[1]))
        try:
            with pytest.raises(EvaluationError, match=r"the same command continues"):
                results.append({"id": "3", "text": "x" * 100})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert path.read_bytes() == content and "3" not in results.records
        results.append({"id": "3", "text": ""})
    assert path.read_bytes().startswith(content) and len(path.read_bytes().splitlines()) == 5
