"""The roots of a set are known by their stripe.json, and anything wrong with them is said when the store opens."""

import json
import logging
import shutil
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest

from deepinfer_kvstore.code import Code
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.stripe_set import STRIPE_FILE, open_set

CODE = Code(3, 2)


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    """Five empty directories."""
    made = [tmp_path / f"disk{number}" for number in range(5)]
    for root in made:
        root.mkdir()
    return made


def test_empty_directories_become_a_set_that_opens_again(roots: list[Path]) -> None:
    (roots[1] / "lost+found").mkdir()  # as a new file system has
    made = open_set(roots, CODE, create=True)
    assert made.present == (True,) * 5
    assert made.control_roots == roots[:3]
    assert open_set(roots, CODE, create=False) == open_set(roots, CODE, create=True) == made
    assert [json.loads((root / STRIPE_FILE).read_text())["index"] for root in roots] == [0, 1, 2, 3, 4]


def test_nothing_is_made_for_readers(roots: list[Path]) -> None:
    with pytest.raises(StoreConfigError, match="none of the roots .* has a stripe.json"):
        open_set(roots, CODE, create=False)
    assert not any(any(root.iterdir()) for root in roots)


def test_processes_that_make_a_set_at_once_make_one(roots: list[Path]) -> None:
    with ThreadPool(8) as pool:
        made = pool.map(lambda _: open_set(roots, CODE, create=True), range(8))
    assert len({each.id for each in made}) == 1
    assert made[0].present == (True,) * 5


@pytest.mark.parametrize("left", [(0,), (0, 1, 2), (3, 4)])
def test_a_creation_that_was_cut_short_goes_on(roots: list[Path], left: tuple[int, ...]) -> None:
    first = open_set(roots, CODE, create=True)
    for number in range(5):
        if number not in left:
            (roots[number] / STRIPE_FILE).unlink()
    assert open_set(roots, CODE, create=True) == first


def test_up_to_m_lost_roots_are_named_and_more_are_an_error(
    roots: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    made = open_set(roots, CODE, create=True)
    (roots[2] / "namespace").mkdir()
    shutil.rmtree(roots[0])
    shutil.rmtree(roots[4])
    roots[4].mkdir()  # a mount point with nothing mounted
    with caplog.at_level(logging.WARNING):
        found = open_set(roots, CODE, create=True)
    assert (found.id, found.present) == (made.id, (False, True, True, True, False))
    assert found.control_roots == roots[1:3]
    assert [str(roots[0]) in message and str(roots[4]) in message for message in caplog.messages] == [True]
    assert not any(roots[4].iterdir())
    shutil.rmtree(roots[1])
    with pytest.raises(StoreConfigError, match=r"3 of 5 roots are lost .*disk1.*, 3\+2 survives 2: mount them"):
        open_set(roots, CODE, create=True)


def test_roots_in_another_order_are_an_error_that_says_which(roots: list[Path]) -> None:
    open_set(roots, CODE, create=True)
    with pytest.raises(StoreConfigError, match="disk1 is number 1 of its set .*, named as number 0"):
        open_set([roots[1], roots[0], *roots[2:]], CODE, create=True)


def test_a_root_of_another_set_is_an_error_that_says_which(roots: list[Path], tmp_path: Path) -> None:
    open_set(roots, CODE, create=True)
    others = [tmp_path / f"other{number}" for number in range(5)]
    for root in others:
        root.mkdir()
    open_set(others, CODE, create=True)
    with pytest.raises(StoreConfigError, match="other3 is of stripe set"):
        open_set([*roots[:3], others[3], roots[4]], CODE, create=True)


def test_other_mistakes_are_named(roots: list[Path]) -> None:
    open_set(roots, CODE, create=True)
    with pytest.raises(StoreConfigError, match=r"4 roots for erasure code 3\+2: it needs 5"):
        open_set(roots[:4], CODE, create=True)
    with pytest.raises(StoreConfigError, match="named twice"):
        open_set([*roots[:4], roots[0] / ".." / roots[0].name], CODE, create=True)
    with pytest.raises(StoreConfigError, match=r"of a 3\+2 set, not 4\+1"):
        open_set(roots, Code(4, 1), create=True)
    for text in ["", "[]", "{}", '{"set": "x"}', '{"set":-1,"index":0,"data":3,"parity":2}', "\xff" * 5000, "[" * 4096]:
        (roots[2] / STRIPE_FILE).write_text(text)
        with pytest.raises(StoreConfigError, match="is not a stripe.json"):
            open_set(roots, CODE, create=True)


def test_directories_with_other_things_in_them_are_not_made_roots(roots: list[Path]) -> None:
    (roots[3] / "photos").mkdir()
    with pytest.raises(StoreConfigError, match="none of the roots"):
        open_set(roots, CODE, create=True)
