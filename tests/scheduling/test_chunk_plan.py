"""What a step has room for: within the target, the summed context and what is known, and never nothing."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from deepinfer_costmodel.cost import Cost
from deepinfer_costmodel.step import Load, StepCost
from deepinfer_vllm.scheduling.cuts import PLAIN
from deepinfer_vllm.scheduling.plan import StepPlan
from deepinfer_vllm.scheduling.settings import Settings

COST = StepCost(Cost(0.004, 3e-5, 2e-9), 0.003, 1e-4, 1e-8, 4e-5)
INDEXED = StepCost(Cost(0.02, 2e-5, 4e-9, cap_tokens=1024, index=5e-11), 0.015, 5e-5, 1e-9, 3e-5)
SETTINGS = Settings(target_s=0.03, least_share=0.25, grid=128, most_tokens=32_768, most_context=1 << 40, file="")
PROMPTS = st.lists(st.tuples(st.integers(0, 60_000), st.integers(2, 40_000), st.booleans()), min_size=1, max_size=8)


@given(
    prompts=PROMPTS,
    decodes=st.integers(0, 512),
    context=st.integers(0, 4_000_000),
    tail=st.floats(0.8, 1.5),
    target_s=st.sampled_from([0.001, 0.01, 0.03, 0.2, inf]),
    share=st.sampled_from([0.0, 0.25, 0.9]),
    most_context=st.sampled_from([1, 1000, 50_000, 1 << 40]),
    tokens=st.sampled_from([128, 1000, 1 << 40]),
)
def test_steps(
    prompts: list[tuple[int, int, bool]],
    decodes: int,
    context: int,
    tail: float,
    target_s: float,
    share: float,
    most_context: int,
    tokens: int,
) -> None:
    settings = replace(SETTINGS, target_s=target_s, least_share=share, most_context=most_context)
    plan = StepPlan(settings, COST, Load(decodes=decodes, context=context if decodes else 0), tail=tail, tokens=tokens)
    for number, (start, most, final) in enumerate(prompts):
        if (count := plan.tokens(start, most, PLAIN, final=final)) > 0:
            plan.add(str(number), start, count)
    decodes_s = COST.seconds(plan.decodes)
    chunks = list(plan.chunks.values())
    assert chunks[0] == (prompts[0][0], chunks[0][1])  # the oldest goes on
    assert all(count <= settings.most_tokens for _, count in chunks)
    load = plan.decodes
    for start, count in chunks:
        load = load.chunk(count, start, None)
    # More than one piece of the grid of the first prompt is there only where everything allows it.
    if len(chunks) > 1 or chunks[0][1] > 128:
        assert sum(start + count for start, count in chunks) <= most_context
        if decodes:
            start, count = chunks[-1]
            piece_s = COST.prefill.seconds(127, start + count) - COST.prefill.alpha if plan.beyond_target else 0.0
            assert COST.seconds(load) <= max(target_s / tail, decodes_s + plan.least_s + piece_s) + 1e-9
            assert load.tokens <= tokens
    if not plan.beyond_target:  # then it is as without a least share
        assert not decodes or target_s / tail >= (decodes_s + COST.prefill.alpha - COST.step) / (1 - share) - 1e-9
        kept = StepPlan(replace(settings, least_share=0.0), COST, plan.decodes, tail=tail, tokens=tokens)
        for number, (start, most, final) in enumerate(prompts):
            assert (count := kept.tokens(start, most, PLAIN, final=final)) == plan.chunks.get(str(number), (0, 0))[1]
            if count:
                kept.add(str(number), start, count)


def test_takes_the_largest_chunk_that_fits() -> None:
    decodes = Load(decodes=16, context=32_000)
    for target_s in (0.02, 0.03, 0.1, 1.0):
        plan = StepPlan(replace(SETTINGS, target_s=target_s), COST, decodes)
        count = plan.tokens(5000, 1 << 20, PLAIN, final=False)
        assert (5000 + count) % 128 == 0
        assert COST.seconds(decodes.chunk(count, 5000, None)) <= target_s
        assert count + 128 > 32_768 or COST.seconds(decodes.chunk(count + 128, 5000, None)) > target_s


def test_a_step_without_room_goes_on_by_one_piece_and_is_full() -> None:
    settings = replace(SETTINGS, least_share=0.0)
    plan = StepPlan(settings, COST, Load(decodes=512, context=10_000_000))
    assert plan.room_s == COST.prefill.alpha - COST.step and plan.beyond_target and not plan.full
    assert plan.tokens(1000, 5000, PLAIN, final=True) == 24  # to 1024
    plan.add("a", 1000, 24)
    assert plan.full and plan.tokens(0, 5000, PLAIN, final=True) == 0


@given(
    cost=st.sampled_from([COST, INDEXED]),
    decodes=st.integers(1, 512),
    context=st.integers(0, 4_000_000),
    start=st.integers(0, 60_000),
    share=st.floats(0.01, 0.9),
    grid=st.sampled_from([1, 16, 128]),
)
def test_where_the_target_has_no_room_prompts_get_their_share_and_little_more(
    cost: StepCost, decodes: int, context: int, start: int, share: float, grid: int
) -> None:
    """Of the best there is, by trying every size; a piece of the grid less would not be enough for the formula."""
    settings = replace(SETTINGS, target_s=0.001, least_share=share, grid=grid)
    load = Load(decodes=decodes, context=context)
    plan = StepPlan(settings, cost, load)
    count = plan.tokens(start, 1 << 20, PLAIN, final=False)

    def seconds(tokens: int) -> float:
        return cost.seconds(load.chunk(tokens, start, cost.prefill.cap_tokens))

    sizes = range(16, settings.most_tokens + 1, 16)
    assert count / seconds(count) >= share * max(size / seconds(size) for size in sizes)
    fixed_s = seconds(0)
    if count > grid:
        less = count - grid if (start + count) % grid == 0 else count - 1
        assert seconds(less) - fixed_s < share / (1 - share) * fixed_s + 1e-12


def test_without_decodes_and_in_throughput_mode_nobody_waits() -> None:
    alone = StepPlan(SETTINGS, COST, Load(), tokens=128)
    throughput = StepPlan(replace(SETTINGS, target_s=inf), COST, Load(decodes=512, context=10_000_000))
    for plan in (alone, throughput):
        assert plan.tokens(0, 1 << 20, PLAIN, final=False) == 32_768
        plan.add("a", 0, 32_768)
        assert not plan.full


def test_images_take_their_share() -> None:
    decodes = Load(decodes=1, context=1000)
    plain, with_image = (StepPlan(SETTINGS, COST, decodes) for _ in range(2))
    plain.add("a", 0, 128)
    with_image.add("a", 0, 128, embeds=500)
    assert plain.room_s - with_image.room_s == 500 * COST.embed


@given(
    start=st.integers(0, 5000),
    gaps=st.lists(st.tuples(st.integers(0, 900), st.integers(1, 600)), max_size=5),
    decodes=st.integers(1, 64),
    target_s=st.floats(0.01, 0.2),
)
def test_a_chunk_has_the_images_that_there_is_time_to_encode(
    start: int, gaps: list[tuple[int, int]], decodes: int, target_s: float
) -> None:
    """By trying every end."""
    images, at = [], start
    for gap, tokens in gaps:
        images.append((at + gap, tokens))
        at += gap + tokens
    load = Load(decodes=decodes, context=1000)
    plan = StepPlan(replace(SETTINGS, target_s=target_s, least_share=0.0, grid=1), COST, load)
    plan.add("another", 0, 1)
    room_s = plan.room_s
    found = plan.tokens(start, 3000, PLAIN, final=False, encoded=images)

    def seconds(tokens: int) -> float:
        embeds = sum(each for position, each in images if position < start + tokens)
        return COST.prefill.seconds(tokens, start) - COST.step + COST.embed * embeds

    fits = [tokens for tokens in range(1, 3001) if seconds(tokens) <= room_s + 1e-12]
    assert found == max(fits, default=0)
