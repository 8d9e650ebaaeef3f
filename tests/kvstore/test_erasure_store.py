"""A store over the roots of a stripe set: any m of them may go, with all that is on them."""

import json
import logging
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.run_reader import RunReader
from deepinfer_kvstore.store import Store
from store_case import aligned, descriptor, get, key, options, payload, put

ROOTS = 6
BLOCKS = range(40)


def roots_of(tmp_path: Path) -> list[Path]:
    return [tmp_path / f"disk{number}" for number in range(ROOTS)]


def open_ec(tmp_path: Path, roots: Sequence[Path] | None = None, **changes: Any) -> Store:
    """A 4+2 store over the roots of `tmp_path`, which are made if none is there."""
    roots = roots or roots_of(tmp_path)
    if not any(root.exists() for root in roots):
        for root in roots:
            root.mkdir()
    fields = {"ec": "4+2", "roots": tuple(roots), "io_timeout_s": 10.0, **changes}
    return Store.open(roots[0], descriptor(), options(tmp_path, 8, **fields))


def expected(numbers: Sequence[int] = BLOCKS) -> list[bytes]:
    return [payload(number) for number in numbers]


def slabs_of(root: Path) -> list[Path]:
    return sorted(root.glob("*/slabs/*.slab"))


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_blocks_come_back_and_are_found_after_a_restart(tmp_path: Path, direct: str) -> None:
    store = open_ec(tmp_path, direct=direct)
    writer = store.writer
    assert put(store, BLOCKS) == [True] * 40
    assert get(store, [*BLOCKS, 99]) == [*expected(), None]
    store.close()
    again = open_ec(tmp_path, direct=direct)
    assert again.writer == writer
    assert get(again, BLOCKS) == expected()
    again.close()
    names = [[slab.name for slab in slabs_of(root)] for root in roots_of(tmp_path)]
    assert names[0] and all(each == names[0] for each in names)


@pytest.mark.parametrize("lost", [(0, 1), (0, 2), (1, 2), (2, 5), (4, 5)])
def test_two_roots_removed_lose_no_byte_and_the_store_goes_on(
    tmp_path: Path, lost: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """The journals and leases too: any m of m + 1 replicas may be gone."""
    store = open_ec(tmp_path)
    writer = store.writer
    put(store, BLOCKS)
    store.close()
    for number in lost:
        shutil.rmtree(roots_of(tmp_path)[number])
    shutil.rmtree(tmp_path / "index")  # so the journals have to tell
    with caplog.at_level(logging.WARNING):
        again = open_ec(tmp_path)
    assert len([message for message in caplog.messages if "lost" in message]) == 1
    assert again.stats().degraded_roots == 2
    assert again.writer == writer, "its lease has replicas"
    assert get(again, BLOCKS) == expected()
    assert put(again, range(40, 60)) == [True] * 20
    assert get(again, range(60)) == expected(range(60))
    again.close()


def test_two_roots_removed_while_it_is_open(tmp_path: Path) -> None:
    store = open_ec(tmp_path)
    put(store, BLOCKS)
    for number in (0, 3):
        shutil.rmtree(roots_of(tmp_path)[number])
    assert get(store, BLOCKS) == expected()
    assert put(store, range(40, 90)) == [True] * 50  # in new slabs too
    assert get(store, range(90)) == expected(range(90))
    store.close()
    again = open_ec(tmp_path)
    assert get(again, range(90)) == expected(range(90))
    again.close()


def test_more_roots_lost_than_m_is_an_error_at_open(tmp_path: Path) -> None:
    open_ec(tmp_path).close()
    for root in roots_of(tmp_path)[3:]:
        shutil.rmtree(root)
    with pytest.raises(StoreConfigError, match="3 of 6 roots are lost"):
        open_ec(tmp_path)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_random_damage_to_two_roots_loses_no_byte_and_to_more_gives_no_wrong_one(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    rng = random.Random(seed)
    tmp_path = tmp_path_factory.mktemp("ec")
    direct = rng.choice(["auto", "off"])
    store = open_ec(tmp_path, direct=direct)
    put(store, BLOCKS)
    store.close()
    damaged = rng.sample(range(ROOTS), rng.randrange(5))
    for number in damaged:
        for slab in slabs_of(roots_of(tmp_path)[number]):
            _spoil(slab, rng)
    again = open_ec(tmp_path, direct=direct)
    found = get(again, BLOCKS)
    coded = again.stats().coded
    assert bool(coded["unreadable_slots"]) <= (len(damaged) > 2)
    stored = put(again, range(100, 120))
    assert all(stored) or len(damaged) > 2
    for numbers, blocks in ((BLOCKS, found), (range(100, 120), get(again, range(100, 120)))):
        if len(damaged) <= 2:
            assert blocks == expected(numbers)
        else:
            assert all(block in (None, payload(number)) for number, block in zip(numbers, blocks, strict=True))
    again.close()
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("ec", ["1+1", "3+1", "4+2", "5+1"])
def test_shards_are_put_together_in_c_as_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ec: str) -> None:
    read, answers = RunReader.read_shards, list[bytes | None]()

    def seen(*arguments: Any) -> bytes | None:
        answers.append(read(*arguments))
        return answers[-1]

    monkeypatch.setattr(RunReader, "read_shards", seen)
    store = open_ec(tmp_path, roots_of(tmp_path)[: sum(map(int, ec.split("+")))], ec=ec, direct="off")
    lengths = [1, 819, 1638, 2731, 4095, 4096, 4097, 5999, 6000, *random.Random(ec).choices(range(1, 6001), k=31)]
    assert all(put(store, range(40), lambda number: payload(number, lengths[number])))
    in_c = store._loads.reads.reader
    for reader in (in_c, None, in_c):
        store._loads.reads.reader = reader
        buffers = [aligned(length) for length in lengths]
        transfer = store.get([key(number) for number in range(40)], buffers)
        assert transfer.wait(60) and all(transfer.results())
        assert list(map(bytes, buffers)) == [payload(number, length) for number, length in enumerate(lengths)]
    assert len(answers) >= 2 and None not in answers
    store._loads.reads.reader, answers[:] = in_c, []
    for slab in slabs_of(roots_of(tmp_path)[0]):  # a shard in another's place, its own hash being right
        content = slab.read_bytes()
        slab.write_bytes(content[4096:] + content[:4096])
    assert get(store, [39], lengths[39]) == [payload(39, lengths[39])]
    store.close()


def _spoil(slab: Path, rng: random.Random) -> None:
    size = slab.stat().st_size
    way = rng.choice(["flip", "cut", "remove", "swap", "zero"])
    if way == "cut":
        with slab.open("r+b") as file:
            file.truncate(rng.randrange(size))
    elif way == "remove":
        slab.unlink()
    elif way == "swap":  # shards of other slots
        content = slab.read_bytes()
        at = rng.randrange(1, size // 4096) * 4096
        slab.write_bytes(content[at:] + content[:at])
    else:
        with slab.open("r+b") as file:
            for _ in range(rng.randrange(1, 30)):
                file.seek(rng.randrange(size))
                file.write(bytes(300) if way == "zero" else rng.randbytes(3))


def test_processes_share_it(tmp_path: Path) -> None:
    one, two = open_ec(tmp_path), open_ec(tmp_path)
    assert one.writer != two.writer
    put(one, range(20))
    put(two, range(20, 40))
    assert one.sync(60)
    assert two.sync(60)
    assert get(one, BLOCKS) == get(two, BLOCKS) == expected()
    one.close()
    two.close()
    reader = open_ec(tmp_path, read_only=True)
    assert get(reader, BLOCKS) == expected()
    reader.close()


def test_a_root_that_comes_back_is_read_and_written_again(tmp_path: Path) -> None:
    """With what it missed, which is told from what is new by the writes its shards are of."""
    roots = roots_of(tmp_path)
    store = open_ec(tmp_path)
    put(store, range(20))
    store.close()
    for number in (1, 5):
        roots[number].rename(tmp_path / f"away{number}")
    store = open_ec(tmp_path)
    store.delete([key(number) for number in range(20)])
    put(store, range(100, 140))
    store.close()
    for number in (1, 5):
        (tmp_path / f"away{number}").rename(roots[number])
    store = open_ec(tmp_path)
    assert put(store, range(200, 220)) == [True] * 20
    assert get(store, [*range(20), *range(100, 140), *range(200, 220)]) == [
        *[None] * 20, *expected(range(100, 140)), *expected(range(200, 220)),
    ]  # fmt: skip
    store.close()
    for number in (0, 3):  # the ones that were away have enough of the new blocks
        shutil.rmtree(roots[number])
    store = open_ec(tmp_path)
    assert get(store, range(200, 220)) == expected(range(200, 220))
    store.close()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ec": "4+"}, "write it k.m"),
        ({"ec": "4+1"}, "6 roots for ec 4.1: it needs 5"),
        ({"ec": ""}, "erasure code ''"),
        ({"ec_margin": 3}, "ec_margin is 3, it must be 0 to 2"),
        ({"backend": "memory"}, "memory has no roots to lose"),
    ],
)
def test_bad_options_are_one_clear_error(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(StoreConfigError, match=says):
        open_ec(tmp_path, **changes)


def test_another_first_root_is_an_error(tmp_path: Path) -> None:
    open_ec(tmp_path).close()
    roots = roots_of(tmp_path)
    with pytest.raises(StoreConfigError, match="disk1 is not the first of roots"):
        Store.open(roots[1], descriptor(), options(tmp_path, ec="4+2", roots=tuple(roots)))


def test_control_files_are_on_the_first_roots(tmp_path: Path) -> None:
    store = open_ec(tmp_path)
    put(store, range(3))
    holders = [len(list(root.glob("*/journals/*.log"))) for root in roots_of(tmp_path)]
    assert holders == [1, 1, 1, 0, 0, 0]
    leases = [[json.loads(path.read_text()) for path in root.glob("*/writers/*")] for root in roots_of(tmp_path)[:3]]
    assert leases[0] == leases[1] == leases[2]
    assert leases[0][0]["writer"] == store.writer
    store.close()
