"""A lost root is made again from the others, while the store is in use."""

import shutil
from pathlib import Path

import pytest
from test_erasure_store import BLOCKS, ROOTS, expected, open_ec, roots_of, slabs_of

from deepinfer_kvstore.ec_rebuild import REBUILD_FILE, Rebuilt, rebuild
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.stripe_set import STRIPE_FILE
from deepinfer_vllm.cli.main import run
from store_case import get, put


def others(tmp_path: Path, *lost: int) -> list[Path]:
    return [root for number, root in enumerate(roots_of(tmp_path)) if number not in lost]


def quiet(done: int, total: int) -> None:
    assert 0 < done <= total


def lose(tmp_path: Path, number: int) -> Path:
    """Move a root away; where it is now."""
    away = tmp_path / f"away{number}"
    roots_of(tmp_path)[number].rename(away)
    return away


@pytest.mark.parametrize("number", range(ROOTS))
def test_a_root_is_made_again_byte_for_byte(tmp_path: Path, number: int) -> None:
    store = open_ec(tmp_path)
    put(store, BLOCKS)
    store.close()
    away = lose(tmp_path, number)
    new = roots_of(tmp_path)[number]
    seen: list[tuple[int, int]] = []
    done = rebuild(others(tmp_path, number), new, lambda *at: seen.append(at))
    slabs = slabs_of(away)
    assert done == Rebuilt(number, 1, len(slabs), 40, 16 * len(slabs) - 40)
    assert seen[-1] == (16 * len(slabs), 16 * len(slabs))
    assert [slab.name for slab in slabs_of(new)] == [slab.name for slab in slabs]
    for made, lost in zip(slabs_of(new), slabs, strict=True):
        assert made.read_bytes() == lost.read_bytes()
    for pattern in ("stripe.json", "*/*.json", "*/journals/*.log"):
        paths = sorted(path.relative_to(away) for path in away.glob(pattern))
        assert sorted(path.relative_to(new) for path in new.glob(pattern)) == paths
        assert all((new / path).read_bytes() == (away / path).read_bytes() for path in paths)
    assert not (new / REBUILD_FILE).exists()
    for gone in [(number + 2) % ROOTS, (number + 3) % ROOTS]:
        shutil.rmtree(roots_of(tmp_path)[gone])
    store = open_ec(tmp_path)
    assert get(store, BLOCKS) == expected()
    store.close()


def test_two_lost_roots_are_made_one_after_the_other(tmp_path: Path) -> None:
    store = open_ec(tmp_path)
    put(store, BLOCKS)
    store.close()
    for number in (1, 4):
        shutil.rmtree(roots_of(tmp_path)[number])
    with pytest.raises(StoreConfigError, match="root number 2 is not lost: lost are 1, 4"):
        rebuild(others(tmp_path, 1, 4), tmp_path / "disk4", quiet, number=2)
    assert rebuild(others(tmp_path, 1, 4), tmp_path / "disk4", quiet, number=4).number == 4
    assert rebuild(others(tmp_path, 1), tmp_path / "disk1", quiet).number == 1
    for number in (0, 5):
        shutil.rmtree(roots_of(tmp_path)[number])
    store = open_ec(tmp_path)
    assert get(store, BLOCKS) == expected()
    store.close()


def test_blocks_stored_meanwhile_are_read_with_and_without_the_new_root(tmp_path: Path) -> None:
    """The engine that runs does not know the new root: what it writes later is on the others only."""
    store = open_ec(tmp_path)
    put(store, BLOCKS)
    store.close()
    shutil.rmtree(roots_of(tmp_path)[3])
    running = open_ec(tmp_path)
    stored: list[int] = []

    def store_more(done: int, total: int) -> None:
        assert put(running, range(100 + len(stored), 108 + len(stored))) == [True] * 8
        stored.extend(range(8))

    rebuild(others(tmp_path, 3), roots_of(tmp_path)[3], store_more)
    assert stored
    numbers = [*BLOCKS, *range(100, 100 + len(stored))]
    assert get(running, numbers) == expected(numbers)
    running.close()
    again = open_ec(tmp_path)
    assert get(again, numbers) == expected(numbers)
    assert put(again, range(300, 310)) == [True] * 10
    again.close()
    shutil.rmtree(roots_of(tmp_path)[0])
    last = open_ec(tmp_path)
    assert get(last, [*numbers, *range(300, 310)]) == expected([*numbers, *range(300, 310)])
    last.close()


def test_a_rebuild_that_was_cut_short_is_done_again(tmp_path: Path) -> None:
    store = open_ec(tmp_path)
    put(store, BLOCKS)
    store.close()
    shutil.rmtree(roots_of(tmp_path)[2])
    new = tmp_path / "new"

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rebuild(others(tmp_path, 2), new, stop)
    assert (new / REBUILD_FILE).exists()
    assert not (new / STRIPE_FILE).exists(), "nobody takes it for a root yet"
    assert rebuild(others(tmp_path, 2), new, quiet).number == 2
    roots = roots_of(tmp_path)
    store = open_ec(tmp_path, [*roots[:2], new, *roots[3:]])
    assert get(store, BLOCKS) == expected()
    store.close()


def test_damage_to_two_more_roots_is_worked_around(tmp_path: Path) -> None:
    """With one root lost, one of the others may still hold nonsense."""
    store = open_ec(tmp_path)
    put(store, BLOCKS)
    store.close()
    away = lose(tmp_path, 5)
    for slab in slabs_of(roots_of(tmp_path)[0]):
        slab.write_bytes(b"\x5a" * slab.stat().st_size)
    rebuild(others(tmp_path, 5), roots_of(tmp_path)[5], quiet)
    for made, lost in zip(slabs_of(roots_of(tmp_path)[5]), slabs_of(away), strict=True):
        assert made.read_bytes() == lost.read_bytes()


def test_mistakes_are_one_clear_error(tmp_path: Path) -> None:
    open_ec(tmp_path).close()
    (tmp_path / "elsewhere").mkdir()
    open_ec(tmp_path / "elsewhere").close()
    roots, new = roots_of(tmp_path), tmp_path / "new"
    cases = [
        (roots, new, "all 6 roots are named"),
        (roots[:3], new, "3 roots are named, 4 are needed"),
        ([], new, "0 roots are named"),
        ([*roots[:4], roots_of(tmp_path / "elsewhere")[5]], new, "disk5 is of stripe set"),
        ([*roots[:4], roots[0]], new, "number 0 of its set, as another named"),
        ([*roots[:4], tmp_path / "elsewhere"], new, "has no stripe.json"),
        (roots[:5], tmp_path, "is not empty"),
        (roots[:5], roots[5], "is not empty"),
        (roots[:5], tmp_path / "no" / "where", "cannot be written"),
    ]
    for named, onto, says in cases:
        with pytest.raises(StoreConfigError, match=says):
            rebuild(named, onto, quiet)
    assert not new.exists()


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store = open_ec(tmp_path)
    put(store, BLOCKS)
    store.close()
    shutil.rmtree(roots_of(tmp_path)[1])
    named = [argument for root in others(tmp_path, 1) for argument in ("--root", str(root))]
    assert run(["kvstore", "rebuild", *named, "--onto", str(tmp_path / "disk1")]) == 0
    assert "disk1 is root number 1 (counted from 0): 40 shards in 3 slabs of 1 namespaces" in capfd.readouterr().out
    assert run(["kvstore", "rebuild", *named, "--onto", str(tmp_path / "disk1")]) == 1
    error = capfd.readouterr().err
    assert error.startswith("deepinfer: kvstore rebuild: ")
    assert "is not empty" in error
    assert error.count("\n") == 1
    store = open_ec(tmp_path)
    assert get(store, BLOCKS) == expected()
    store.close()
