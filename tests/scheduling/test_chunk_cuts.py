"""Where chunks end: on the grid, at checkpoints, never inside an image, and always somewhere."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_vllm.scheduling.cuts import MOST_CHECKPOINTS, PLAIN, Cuts, requested_checkpoints

SPANS = st.lists(st.tuples(st.integers(0, 400), st.integers(1, 120)), max_size=6)


def inside(position: int, images: list[tuple[int, int]]) -> bool:
    """The slow reference: whether a cut before this position cuts an image, or images that overlap."""
    covered = {cell for first, tokens in images for cell in range(first + 1, first + tokens)}
    return position in covered


@given(
    images=SPANS,
    checkpoints=st.lists(st.integers(1, 500), max_size=6),
    grid=st.sampled_from([1, 16, 128]),
    start=st.integers(0, 450),
    affordable=st.integers(0, 300),
    most=st.integers(1, 300),
    final=st.booleans(),
    must=st.booleans(),
)
def test_ends(
    images: list[tuple[int, int]],
    checkpoints: list[int],
    grid: int,
    start: int,
    affordable: int,
    most: int,
    final: bool,
    must: bool,
) -> None:
    cuts = Cuts.of(checkpoints, images)
    limit, wanted = start + most, start + min(affordable, most)
    end = cuts.chunk_end(start, wanted, limit, grid, final=final, must=must)
    assert start <= end <= limit
    legal = {
        at
        for at in range(start + 1, limit + 1)
        if not inside(at, images)
        and (
            at % grid == 0
            or at in checkpoints
            or at in {edge for first, tokens in images for edge in (first, first + tokens)}
            or (final and at == limit)
        )
    } | ({limit} if final else set())
    passed = [c for c in checkpoints if start < c < end and not inside(c, images)]
    assert passed == []  # no checkpoint is run over
    affordable_ends = {at for at in legal if at <= wanted and not any(start < c < at for c in cuts.checkpoints)}
    preferred = {at for at in affordable_ends if at % grid == 0 or at in cuts.checkpoints or (final and at == limit)}
    if preferred:
        assert end == max(preferred)
    elif not must:
        assert end == start
    else:
        assert end > start
        assert end in legal or end == limit
        if affordable_ends:
            assert end == max(affordable_ends)
        elif end > wanted and end < limit:
            assert not any(wanted < at < end and at % grid == 0 for at in legal)  # no further than it must


@given(images=SPANS, position=st.integers(0, 600))
def test_outside_and_beyond_are_the_edges(images: list[tuple[int, int]], position: int) -> None:
    cuts = Cuts.of((), images)
    before, after = cuts.outside(position), cuts.beyond(position)
    if not inside(position, images):
        assert before == after == position
    else:
        assert before < position < after
        assert not inside(before, images) and not inside(after, images)
        assert all(inside(at, images) for at in range(before + 1, after))


def test_walks_a_prompt_to_its_end() -> None:
    cuts = Cuts.of([100, 300, 310, 5000], [(130, 200), (400, 10)])
    ends, at = [], 0
    while at < 700:
        at = cuts.chunk_end(at, min(at + 70, 700), 700, 64, final=True, must=True)
        ends.append(at)
    # 100 is asked for; 300 and 310 are inside the first image, which is longer than a chunk and stays whole.
    assert ends == [64, 100, 128, 130, 330, 384, 448, 512, 576, 640, 700]


def test_a_plain_prompt() -> None:
    assert PLAIN.chunk_end(0, 1000, 5000, 128, final=False, must=False) == 896
    assert PLAIN.chunk_end(896, 1000, 1000, 128, final=True, must=False) == 1000
    assert PLAIN.chunk_end(896, 1000, 1000, 128, final=False, must=False) == 896
    assert PLAIN.chunk_end(896, 900, 5000, 128, final=False, must=True) == 1024
    assert PLAIN.chunk_end(896, 900, 960, 128, final=False, must=True) == 960  # vLLM has no room for more


@pytest.mark.parametrize(
    ("params", "found"),
    [
        (None, ()),
        ({}, ()),
        ({"chunk_checkpoints": None}, ()),
        ({"chunk_checkpoints": "12"}, ()),
        ({"chunk_checkpoints": {"a": 1}}, ()),
        ("chunk_checkpoints", ()),
        ({"chunk_checkpoints": [128, -1, 0, True, 2.5, "7", None, 256]}, (128, 256)),
        ({"chunk_checkpoints": [1 << 60]}, (1 << 60,)),
    ],
)
def test_what_is_no_checkpoint_is_left_out(params: Any, found: tuple[int, ...]) -> None:
    assert requested_checkpoints(params) == found


def test_a_request_has_so_many_checkpoints_at_most() -> None:
    assert len(requested_checkpoints({"chunk_checkpoints": list(range(1, 10_000))})) == MOST_CHECKPOINTS
