"""Rows of windows on their way to a snapshot and back: exact bytes, or nothing written."""

import pytest
import torch

from deepinfer_vllm.kv_connector.windows import WindowCopies, WindowGroup, Windows

BLOCKS, ROWS = 10, 4
WINDOWS = Windows(
    (WindowGroup(2, 6, ROWS, (("a", 4 * 8 * 4), ("b", 4 * 8 * 4))), WindowGroup(5, 3, ROWS, (("c", 4 * 2 * 1),))), 12
)


def caches(seed: int) -> dict[str, torch.Tensor]:
    """Layers as vLLM hands them out: strided views, of more than one type."""
    drawn = torch.Generator().manual_seed(seed)
    packed = torch.randn((BLOCKS, 2, 1, ROWS, 8), generator=drawn)
    bits = torch.randint(0, 255, (BLOCKS, 1, ROWS, 2), generator=drawn, dtype=torch.uint8)
    return {"a": packed[:, 0], "b": packed[:, 1], "c": bits}


@pytest.mark.parametrize(("boundary", "first", "second"), [(12, [1, 2], [2]), (24, [4, 5], [5]), (4, [0], [0])])
def test_blocks_that_the_next_token_sees(boundary: int, first: list[int], second: list[int]) -> None:
    assert [list(group.blocks(boundary)) for group in WINDOWS.groups] == [first, second]


def test_there_and_back_in_other_blocks() -> None:
    source, target = caches(0), caches(1)
    untouched = {name: cache.clone() for name, cache in target.items()}
    payload = WindowCopies(WINDOWS, source, BLOCKS).capture(((7, 3), (1,)))
    assert len(payload) == WINDOWS.payload_bytes(12)
    assert WindowCopies(WINDOWS, target, BLOCKS).restore(((2, 9), (4,)), payload)
    for name, moves in {"a": {7: 2, 3: 9}, "b": {7: 2, 3: 9}, "c": {1: 4}}.items():
        for old, new in moves.items():
            assert torch.equal(target[name][new], source[name][old])
        others = [block for block in range(BLOCKS) if block not in moves.values()]
        assert torch.equal(target[name][others], untouched[name][others])


def test_what_does_not_fit_is_refused_whole() -> None:
    target = caches(1)
    before = {name: cache.clone() for name, cache in target.items()}
    copies = WindowCopies(WINDOWS, target, BLOCKS)
    payload = bytes(WINDOWS.payload_bytes(12))
    assert not copies.restore(((2, 9), (4,)), payload[:-1])
    assert not copies.restore(((2,), (4,)), payload)
    assert not copies.restore((), b"")
    assert all(torch.equal(target[name], before[name]) for name in before)


def test_blocks_that_do_not_exist_make_no_snapshot() -> None:
    copies = WindowCopies(WINDOWS, caches(0), BLOCKS)
    assert copies.capture(((7, BLOCKS), (1,))) == b""


def test_names_differ_with_layout_and_namespace() -> None:
    other = Windows(WINDOWS.groups[:1], 12)
    assert len({WINDOWS.digest(bytes(32)), WINDOWS.digest(b"x" * 32), other.digest(bytes(32))}) == 3
