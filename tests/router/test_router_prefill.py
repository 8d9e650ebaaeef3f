"""Which engine prefills a request."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_costmodel.cost import Cost
from deepinfer_costmodel.table import CostTable
from deepinfer_router.engine_costs import EngineCosts
from deepinfer_router.fleet import Fleet
from deepinfer_router.prefill import PrefillPolicy
from deepinfer_router.prefill_config import PrefillConfig
from deepinfer_router.roles import Role
from deepinfer_router.target import Engine, Target
from deepinfer_router.work import Work

FLAT = Cost(alpha=0.0, beta=1e-4, gamma=0.0)  # ten thousand tokens a second
TABLE = CostTable({"default": FLAT, "slow": Cost(0.0, 1e-3, 0.0)}, {"default": "made up", "slow": "made up"})
LENGTHS = [1_000, 20_000, 100_000, 300_000]  # one for each group


PREFILL = frozenset((Role.PREFILL,))


def fleet(
    engines: int, ranks: int = 1, kind: str = "", models: tuple[str, ...] = (), roles: frozenset[Role] = PREFILL
) -> list[Target]:
    targets = []
    for i in range(engines):
        engine = Engine(f"{kind}{i:02}", f"http://10.0.0.{i}:8000", roles, models, kind)
        engine.targets = [Target(engine, rank) for rank in range(ranks)]
        targets += engine.targets
    return targets


def policy(**settings: object) -> PrefillPolicy:
    return PrefillPolicy(
        PrefillConfig(**{"first_cut_requests": 1, "max_pending_s": None} | settings), EngineCosts(TABLE)
    )  # type: ignore[arg-type]


def cut(policy: PrefillPolicy, targets: list[Target], seconds: list[float]) -> None:
    """One epoch in which each group has so many seconds of work, and then the first cut."""
    for length, demand in zip(LENGTHS, seconds, strict=True):
        for _ in range(round(demand / FLAT.seconds(length, 0))):
            policy.arrive(Work(prompt_tokens=length), targets, 0.0)
    policy.arrive(Work(prompt_tokens=1), targets, 20.0)


def groups(policy: PrefillPolicy, targets: list[Target]) -> list[str]:
    """Ids of the engines that serve each group."""
    (pool,) = policy.pools.values()
    return [" ".join(sorted(engine.id for engine in pool.engines_of(g))) for g in range(4)]


def test_before_the_first_cut_all_engines_take_all() -> None:
    targets = fleet(3)
    targets[0].pending_seconds, targets[1].pending_seconds = 2.0, 1.0
    pick = policy().pick(Work(prompt_tokens=300_000, hit_tokens=299_000), targets, 0.0, Random(1))
    assert pick is not None
    assert (pick.target, pick.reason, pick.group) == (targets[2], "in_group", ">=256K")
    assert pick.cost_seconds == pytest.approx(0.1)
    assert pick.predicted_seconds == pytest.approx(0.1)


def test_a_request_stays_in_its_group() -> None:
    router, targets = policy(), fleet(8)
    cut(router, targets, [60, 60, 30, 30])
    served = groups(router, targets)
    assert [len(ids.split()) for ids in served] == [3, 3, 1, 1]
    for length, ids in zip(LENGTHS, served, strict=True):
        picks = {router.pick(Work(prompt_tokens=length), targets, 20.0, Random(seed)) for seed in range(40)}
        assert " ".join(sorted({pick.target.engine.id for pick in picks if pick})) == ids


def test_length_counts_cached_tokens_and_cost_does_not() -> None:
    router, targets = policy(), fleet(8)
    cut(router, targets, [60, 60, 30, 30])
    work = Work(prompt_tokens=100_000, hit_tokens=99_000)
    pick = router.pick(work, targets, 20.0, Random(0))
    assert pick is not None
    assert (pick.group, pick.target.engine.id) == ("64K-256K", groups(router, targets)[2])
    assert pick.cost_seconds == pytest.approx(FLAT.seconds(1000, 99_000))


@pytest.mark.parametrize(("length", "name"), [(0, "<16K"), (16_383, "<16K"), (16_384, "16K-64K"), (262_144, ">=256K")])
def test_edges_belong_to_the_longer_group(length: int, name: str) -> None:
    pick = policy().pick(Work(prompt_tokens=length), fleet(1), 0.0, Random(0))
    assert pick is not None
    assert pick.group == name


def test_pools_off_is_least_work_left() -> None:
    router, targets = policy(pools=False), fleet(4, ranks=2)
    cut(router, targets, [60, 60, 30, 30])
    for i, target in enumerate(targets):
        target.pending_seconds = 10.0 - i
    for length in LENGTHS:
        pick = router.pick(Work(prompt_tokens=length), targets, 30.0, Random(0))
        assert pick is not None
        assert (pick.target, pick.group) == (targets[-1], "all")


def test_equal_targets_are_taken_in_turn_by_chance() -> None:
    router, targets = policy(), fleet(4, ranks=2)
    picks = [router.pick(Work(prompt_tokens=10), targets, 0.0, Random(seed)) for seed in range(200)]
    taken = [sum(pick is not None and pick.target is target for pick in picks) for target in targets]
    assert min(taken) > 5
    again = [router.pick(Work(prompt_tokens=10), targets, 0.0, Random(seed)) for seed in range(200)]
    assert picks == again


def test_engines_without_a_queue_differ_by_what_they_decode() -> None:
    """Engines that do whole requests would else decode what chance gives them."""
    targets = fleet(3)
    for target, held in zip(targets, (500, 100, 300), strict=True):
        target.kv_tokens = held
    least = policy(pools=False)
    rng = Random(0)
    assert least.pick(Work(prompt_tokens=9), targets, 1.0, rng).target is targets[1]  # type: ignore[union-attr]
    targets[1].pending_seconds = 0.25
    assert least.pick(Work(prompt_tokens=9), targets, 1.0, rng).target is targets[2]  # type: ignore[union-attr]
    targets[2].kv_tokens, targets[2].uncertain_until = 0, 31.0
    targets[1].pending_seconds = 0.0
    # One that is new passes for having its part of what the others have.
    assert least.pick(Work(prompt_tokens=9), targets, 1.0, rng).target is targets[1]  # type: ignore[union-attr]
    assert least.pick(Work(prompt_tokens=9), targets, 25.0, rng).target is targets[2]  # type: ignore[union-attr]


def overflowing(overflow: str) -> tuple[PrefillPolicy, list[Target], dict[str, Target]]:
    """Four engines, one for each group, each with much to do."""
    router, targets = policy(overflow=overflow), fleet(4)
    cut(router, targets, [30, 30, 30, 30])
    by_id = {target.engine.id: target for target in targets}
    mine = [by_id[ids] for ids in groups(router, targets)]
    for target in mine:
        target.pending_seconds = 10.0
    return router, targets, dict(zip(["short", "mid", "long", "huge"], mine, strict=True))


@pytest.mark.parametrize(
    ("overflow", "pending", "group", "expected", "reason"),
    [
        ("up", {"long": 1.9}, 0, "long", "overflow_up"),
        ("up", {"long": 2.1}, 0, "short", "in_group"),  # not sooner by enough
        ("none", {"long": 0.0}, 0, "short", "in_group"),
        ("up", {"short": 0.29, "long": 0.0}, 0, "short", "in_group"),  # waits too little to go elsewhere
        ("up", {"short": 0.31, "long": 0.0}, 0, "long", "overflow_up"),
        ("up", {"short": 0.0}, 1, "mid", "in_group"),  # never down
        ("up_and_idle", {"short": 0.0}, 1, "mid", "in_group"),  # the only one of its group
        ("up_and_idle", {"short": 0.0, "long": 0.0}, 1, "long", "overflow_up"),  # up first
    ],
)
def test_overflow(overflow: str, pending: dict[str, float], group: int, expected: str, reason: str) -> None:
    router, targets, by_name = overflowing(overflow)
    for name, seconds in pending.items():
        by_name[name].pending_seconds = seconds
    pick = router.pick(Work(prompt_tokens=LENGTHS[group]), targets, 20.0, Random(3))
    assert pick is not None
    assert (pick.target, pick.reason) == (by_name[expected], reason)


def test_two_idle_engines_of_a_shorter_group_lend_one() -> None:
    """The last idle one is kept: short prompts would wait there for a long one. Idle is an engine if all ranks are."""
    router, targets = policy(), fleet(4, ranks=2)
    cut(router, targets, [90, 0, 30, 0])
    ids = groups(router, targets)
    short = [[target for target in targets if target.engine.id == id] for id in ids[0].split()]
    for target in targets:
        target.pending_seconds = 50.0
    assert len(short) == 3

    def picked() -> str:
        pick = router.pick(Work(prompt_tokens=LENGTHS[2]), targets, 20.0, Random(0))
        assert pick is not None
        return pick.target.engine.id if pick.reason == "overflow_idle" else ""

    assert picked() == ""
    for idle, lent in ((0, ""), (1, short[0][0].engine.id)):
        short[idle][0].pending_seconds = 0.0
        assert picked() == ""  # of its other rank
        short[idle][1].pending_seconds = 0.0
        assert (picked() in (short[0][0].engine.id, short[1][0].engine.id)) == bool(lent)


def test_what_runs_has_had_a_part_of_its_seconds() -> None:
    """Of equal sums the one whose oldest prefill began first is less; nothing is less than what is overdue."""
    router, targets = policy(), fleet(3)
    now = [0.0]
    ranks = Fleet(clock=lambda: now[0])
    first = ranks.book(targets[0], Work(), Role.PREFILL, 8.0)
    now[0] = 3.0
    leases = [ranks.book(targets[1], Work(), Role.PREFILL, seconds) for seconds in (4.0, 4.0)]
    assert [target.prefill_left(5.0) for target in targets] == [3.0, 6.0, 0.0]
    assert [target.prefill_left(50.0) for target in targets] == pytest.approx([0.8, 4.4, 0.0])
    leases[0].first_token()
    assert targets[1].prefill_left(5.0) == 2.0 and targets[1].running_seconds == 4.0
    first.release()
    assert targets[0].prefill_left(5.0) == 0.0 and targets[0].running_seconds == 0.0 and targets[0].prefills == {}
    pick = router.pick(Work(prompt_tokens=10), targets[1:2] + [targets[0]], 5.0, Random(0))
    assert pick is not None and pick.target is targets[0]
    leases[1].release()


def test_excluded_engines_are_left_out_and_the_fleet_helps() -> None:
    router, targets = policy(), fleet(4)
    cut(router, targets, [30, 30, 30, 30])
    mine = groups(router, targets)[0]
    pick = router.pick(Work(prompt_tokens=10, excluded=(mine,)), targets, 20.0, Random(0))
    assert pick is not None
    assert pick.reason == "excluded"
    assert pick.target.engine.id != mine
    everyone = tuple(target.engine.id for target in targets)
    assert router.pick(Work(prompt_tokens=10, excluded=everyone), targets, 20.0, Random(0)) is None
    assert router.pick(Work(prompt_tokens=10), [], 20.0, Random(0)) is None
    assert router.arrive(Work(prompt_tokens=10), [], 20.0) == 0.0


def test_a_slower_kind_is_given_what_it_finishes_sooner() -> None:
    fast, slow = fleet(1), fleet(1, kind="slow")
    router, targets = policy(), fast + slow
    fast[0].pending_seconds = 5.0
    short = router.pick(Work(prompt_tokens=1_000), targets, 0.0, Random(0))  # 5.1 s there, 1 s here
    long = router.pick(Work(prompt_tokens=10_000), targets, 0.0, Random(0))  # 6 s there, 10 s here
    assert short is not None
    assert long is not None
    assert (short.target, short.predicted_seconds) == (slow[0], pytest.approx(1.0))
    assert (long.target, long.predicted_seconds) == (fast[0], pytest.approx(6.0))


def test_a_new_engine_is_not_buried() -> None:
    router, targets = policy(), fleet(4)
    for target in targets[1:]:
        target.pending_seconds = 3.0
    targets[0].uncertain_until = 100.0
    taken = 0
    for seed in range(100):  # nothing finishes meanwhile
        pick = router.pick(Work(prompt_tokens=1_000), targets, 75.0, Random(seed))
        assert pick is not None
        pick.target.pending_seconds += pick.cost_seconds
        taken += pick.target is targets[0]
    assert 10 < taken < 25  # the first thirty in a row, and 47 in all, if it were taken for empty
    targets[0].pending_seconds = 0.0
    pick = router.pick(Work(prompt_tokens=1_000), targets, 99.9, Random(0))
    assert pick is not None
    assert pick.target is targets[0]


def test_models_have_pools_of_their_own() -> None:
    router, ours, theirs = policy(), fleet(4, models=("a",)), fleet(4, kind="b", models=("b",))
    cut(router, ours, [60, 0, 0, 0])
    pick = router.pick(Work(prompt_tokens=300_000), theirs, 20.0, Random(0))
    assert pick is not None
    assert pick.target in theirs
    assert sorted(router.pools) == [(("a",), True), (("b",), True)]


@pytest.mark.parametrize("grouped", [False, True])
def test_engines_that_decode_have_groups_only_if_asked(grouped: bool) -> None:
    """The few that prefilled the many short prompts would decode nearly all."""
    router, targets = policy(pools_where_decoding=grouped), fleet(4, roles=PREFILL | {Role.DECODE})
    cut(router, targets, [30, 30, 30, 30])
    (pool,) = router.pools.values()
    assert [len(pool.engines_of(g)) for g in range(4)] == ([1] * 4 if grouped else [4] * 4)
    assert pool.demand == pytest.approx([1.5] * 4, rel=0.05)


@given(
    pending=st.lists(st.floats(0, 100), min_size=1, max_size=12),
    length=st.sampled_from(LENGTHS),
    excluded=st.sets(st.integers(0, 11)),
    seed=st.integers(0, 99),
)
def test_pick_is_the_minimum_where_there_is_one_pool(
    pending: list[float], length: int, excluded: set[int], seed: int
) -> None:
    router, targets = policy(pools=False), fleet(len(pending))
    for target, seconds in zip(targets, pending, strict=True):
        target.pending_seconds = seconds
    work = Work(prompt_tokens=length, excluded=tuple(f"{i:02}" for i in excluded))
    allowed = [seconds for i, seconds in enumerate(pending) if i not in excluded]
    pick = router.pick(work, targets, 0.0, Random(seed))
    if not allowed:
        assert pick is None
    else:
        assert pick is not None
        assert pick.target.pending_seconds == min(allowed)
        assert pick.target.engine.id not in work.excluded


def test_choices_compares_a_sample() -> None:
    router, targets = policy(choices=2, pools=False), fleet(16)
    for i, target in enumerate(targets):
        target.pending_seconds = float(i)
    picks = [router.pick(Work(prompt_tokens=10), targets, 0.0, Random(seed)) for seed in range(300)]
    waits = [pick.target.pending_seconds for pick in picks if pick]
    assert len(waits) == 300
    assert max(waits) < 15  # the longest queue never wins against another
    assert len(set(waits)) > 8


def test_a_worker_serves_lengths_by_engines_that_another_has_chosen() -> None:
    first, second = policy(), policy()
    targets, same = fleet(8), fleet(8)
    cut(first, targets, [60, 60, 30, 30])
    assert second.cuts() == []
    second.pick(Work(prompt_tokens=10), same, 20.0, Random(0))
    second.follow(first.cuts(), 20.0)
    for length, ids in zip(LENGTHS, groups(first, targets), strict=True):
        pick = second.pick(Work(prompt_tokens=length), same, 20.0, Random(0))
        assert pick is not None
        assert pick.target.engine.id in ids.split()


def test_engines_that_only_prefill_have_groups_beside_some_that_decode_too() -> None:
    whole, targets = fleet(1, kind="", roles=PREFILL | {Role.DECODE}), fleet(5)[1:]
    router, targets = policy(), whole + targets
    cut(router, targets, [30, 30, 30, 30])
    served = [
        {
            pick.target.engine.id
            for seed in range(40)
            if (pick := router.pick(Work(prompt_tokens=length), targets, 20.0, Random(seed)))
        }
        for length in LENGTHS
    ]
    assert [len(ids) for ids in served] == [2, 2, 2, 2]  # its own engine, and the one that is in no group
    assert set.intersection(*served) == {"00"}


def test_a_sample_is_drawn_from_those_that_have_not_failed() -> None:
    router, targets = policy(choices=2, pools=False), fleet(2, ranks=8)
    for seed in range(50):
        pick = router.pick(Work(prompt_tokens=10, excluded=("00",)), targets, 0.0, Random(seed))
        assert pick is not None
        assert (pick.target.engine.id, pick.reason) == ("01", "in_group")


def test_works_of_one_model_and_group_share_a_lane() -> None:
    router = policy()
    lanes = [router.lane(Work(model=model, prompt_tokens=tokens)) for model in "ab" for tokens in (0, 9, *LENGTHS)]
    assert len(set(lanes)) == 8
    assert lanes[0] == lanes[1] == lanes[2]
    assert len({policy(pools=False).lane(Work(prompt_tokens=tokens)) for tokens in LENGTHS}) == 1


def test_with_enough_to_do_everywhere_a_request_waits_in_the_router() -> None:
    router, targets = policy(max_pending_s=5.0), fleet(2)
    targets[0].pending_seconds = targets[1].pending_seconds = 5.1
    work = Work(prompt_tokens=10)
    assert router.pick(work, targets, 0.0, Random(0)) is None
    work.excluded = (targets[0].engine.id,)  # it has failed there, and goes on at once
    again = router.pick(work, targets, 0.0, Random(0))
    assert again is not None
    assert again.target is targets[1]
    work.excluded = ()
    large = Work(prompt_tokens=52_000)  # takes 5.2 s itself
    pick = router.pick(large, targets, 0.0, Random(0))
    assert pick is not None
    targets[1].pending_seconds = 5.0
    pick = router.pick(work, targets, 0.0, Random(0))
    assert pick is not None
    assert pick.target is targets[1]


def test_lists_that_change_with_each_request_neither_move_engines_nor_pile_up() -> None:
    router, targets = policy(), fleet(8)
    cut(router, targets, [60, 60, 30, 30])
    served = groups(router, targets)
    for seed in range(300):  # some have no room just now
        some = tuple(target for target in targets if Random(seed).random() < 0.7 or target is targets[seed % 8])
        pick = router.pick(Work(prompt_tokens=LENGTHS[seed % 4]), some, 20.0, Random(seed))
        assert pick is not None
        own = {target.engine.id for target in some} & set(served[seed % 4].split())
        assert pick.target.engine.id in own or not own
    assert groups(router, targets) == served
    assert len(router._views) <= 64
