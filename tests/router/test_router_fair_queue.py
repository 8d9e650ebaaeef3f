"""The order in which requests leave the queue."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deepinfer_router.fair_queue import Entry, FairQueue

COSTS = st.sampled_from([0.0, 0.01, 0.5, 1.0, 7.0])


def drain(queue: FairQueue[str]) -> list[str]:
    left = []
    while queue:
        entry = queue.heads(1)[0]
        queue.take(entry)
        left.append(entry.item)
    return left


def test_a_tenant_with_much_work_does_not_delay_one_with_little() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(5):
        queue.push("much", "m", 0, 10.0, f"much{i}")
    queue.push("little", "m", 0, 1.0, "little0")
    queue.push("little", "m", 0, 1.0, "little1")
    assert drain(queue) == ["much0", "little0", "little1", "much1", "much2", "much3", "much4"]


def test_weights_share_by_cost() -> None:
    queue: FairQueue[str] = FairQueue({"gold": 3.0})
    for _ in range(8):
        queue.push("gold", "m", 0, 1.0, "gold")
        queue.push("tin", "m", 0, 1.0, "tin")
    first = drain(queue)[:8]
    assert first.count("gold") == 6


def test_priority_then_first_come_inside_a_tenant() -> None:
    queue: FairQueue[str] = FairQueue()
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", -1)):
        queue.push("t", "m", priority, 1.0, name)
    assert drain(queue) == ["d", "a", "c", "b"]


def test_a_tenant_that_comes_back_has_not_saved_up_and_one_that_took_much_is_remembered() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(6):
        queue.push("steady", "m", 0, 1.0, f"steady{i}")
    queue.push("greedy", "m", 0, 4.0, "greedy0")
    left = []
    for _ in range(2):
        entry = queue.heads(1)[0]
        queue.take(entry)
        left.append(entry.item)
    assert left == ["steady0", "greedy0"]
    queue.push("greedy", "m", 0, 4.0, "greedy1")
    queue.push("late", "m", 0, 1.0, "late0")
    assert drain(queue) == ["late0", "steady1", "steady2", "steady3", "greedy1", "steady4", "steady5"]


def test_lanes_stand_side_by_side() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("t", "full", 0, 1.0, "a")
    queue.push("t", "free", 0, 1.0, "b")
    queue.push("u", "free", 0, 1.0, "c")
    assert [entry.item for entry in queue.heads(4)] == ["a", "b", "c"]
    queue.take(queue.heads(4)[1])
    assert [entry.item for entry in queue.heads(4)] == ["c", "a"]


@given(st.lists(st.tuples(st.sampled_from("abc"), COSTS), min_size=1, max_size=60))
def test_tenants_that_always_wait_get_equal_shares(work: list[tuple[str, float]]) -> None:
    """After each step, of those that have waited from the start: no more apart than one entry of each."""
    queue: FairQueue[str] = FairQueue()
    left: dict[str, int] = defaultdict(int)
    most: dict[str, float] = defaultdict(float)
    for tenant, cost in work:
        queue.push(tenant, "m", 0, cost, tenant)
        left[tenant] += 1
        most[tenant] = max(most[tenant], cost)
    took = dict.fromkeys(left, 0.0)
    while queue:
        entry = queue.heads(1)[0]
        queue.take(entry)
        took[entry.tenant] += entry.cost
        left[entry.tenant] -= 1
        waiting = [tenant for tenant in left if left[tenant]]
        for a in waiting:
            for b in waiting:
                assert took[a] - took[b] <= most[a] + most[b] + 1e-6


class Queueing(RuleBasedStateMachine):
    """Against a list: counts, costs, and who may be a head."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue({"b": 2.0})
        self.waiting: list[Entry[int]] = []
        self.arrived = 0

    @rule(tenant=st.sampled_from("abcd"), lane=st.sampled_from("xy"), priority=st.integers(-1, 1), cost=COSTS)
    def push(self, tenant: str, lane: str, priority: int, cost: float) -> None:
        self.arrived += 1
        self.waiting.append(self.queue.push(tenant, lane, priority, cost, self.arrived))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), served=st.booleans())
    def leave(self, data: st.DataObject, served: bool) -> None:
        entry = data.draw(st.sampled_from(self.queue.heads(4) if served else self.waiting))
        self.waiting.remove(entry)
        if served:
            self.queue.take(entry)
        self.queue.drop(entry)

    @invariant()
    def counts_are_those_of_the_list(self) -> None:
        assert len(self.queue) == len(self.waiting)
        assert abs(self.queue.cost - sum(entry.cost for entry in self.waiting)) < 1e-6
        for tenant in "abcd":
            count, cost = self.queue.of(tenant)
            own = [entry.cost for entry in self.waiting if entry.tenant == tenant]
            assert count == len(own)
            assert abs(cost - sum(own)) < 1e-6

    @invariant()
    def heads_are_the_firsts_of_all_tenants_and_lanes(self) -> None:
        firsts = {}
        for entry in sorted(self.waiting, reverse=True):
            firsts[entry.tenant, entry.lane] = entry
        heads = self.queue.heads(4)
        assert len(heads) == len(firsts)
        assert set(heads) == set(firsts.values())


TestQueueing = Queueing.TestCase


def test_memory_of_tenants_that_left_is_bounded() -> None:
    queue: FairQueue[int] = FairQueue()
    queue.push("stays", "m", 0, 1.0, 0)
    for i in range(10_000):
        queue.take(queue.push(f"t{i}", "m", 0, 1.0, i))
    assert len(queue._ahead) <= 4096
    assert sum(map(len, queue._orders.values())) < 20_100
    queue.heads(1)
    assert len(queue) == 1
