"""Weighted fair queueing between tenants, by predicted cost; inside a tenant by priority, then first come."""

from collections.abc import Hashable, Mapping
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")

_LEAST_COST = 1e-6  # of what costs nothing a tenant could have any number
_MAX_AHEAD = 4096


class Entry(Generic[ItemT]):
    """One that waits."""

    __slots__ = ("cost", "item", "lane", "order", "priority", "tenant", "waits")

    def __init__(self, tenant: str, lane: Hashable, priority: int, cost: float, order: int, item: ItemT) -> None:
        self.tenant = tenant
        self.lane = lane
        self.priority = priority
        self.cost = cost
        self.order = order
        self.item = item
        self.waits = True

    def __lt__(self, other: "Entry[ItemT]") -> bool:
        return (self.priority, self.order) < (other.priority, other.order)


class _Flow(Generic[ItemT]):
    """A tenant that has entries."""

    __slots__ = ("cost", "count", "lanes", "number", "start")

    def __init__(self, start: float, number: int) -> None:
        self.start = start  # virtual time at which its next entry begins
        self.number = number
        self.count = 0
        self.cost = 0.0
        self.lanes: dict[Hashable, list[Entry[ItemT]]] = {}

    def head(self, lane: Hashable) -> Entry[ItemT] | None:
        """The first entry of the lane that still waits. A lane without one goes."""
        heap = self.lanes.get(lane, [])
        while heap:
            if heap[0].waits:
                return heap[0]
            heappop(heap)
        self.lanes.pop(lane, None)
        return None


class FairQueue(Generic[ItemT]):
    """Start-time fair queueing (Goyal, Vin and Cheng, 1996): each tenant has a virtual time, which grows by cost over
    weight of what it takes, and the one furthest behind is next. Of two tenants that always have something to place,
    what they took by weight differs by no more than one entry of each. One thread.

    Entries of a tenant in one lane leave by priority, then first come. Lanes stand side by side: an entry that cannot
    be placed holds up its own lane only.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights`: of tenants, above 0; others have 1."""
        self._weights = dict(weights or {})
        self._numbers = count()
        self._clear()

    def _clear(self) -> None:
        self._flows: dict[str, _Flow[ItemT]] = {}
        self._orders: dict[Hashable, list[tuple[float, int, str]]] = {}
        """Of each lane a heap of tenants by virtual time. Older times of a tenant stay in it, void."""
        self._ahead: dict[str, float] = {}
        """Virtual times of tenants without entries, where later than the queue's."""
        self._virtual = 0.0
        self._count = 0
        self.cost = 0.0
        """Seconds, of all that wait."""

    def __len__(self) -> int:
        return self._count

    def of(self, tenant: str) -> tuple[int, float]:
        """Entries of a tenant and their seconds."""
        flow = self._flows.get(tenant)
        return (flow.count, flow.cost) if flow else (0, 0.0)

    def largest(self, most: int) -> dict[str, tuple[int, float]]:
        """Of the tenants with most entries, their number and seconds."""
        first = sorted(self._flows.items(), key=lambda item: -item[1].count)[:most]
        return {tenant: (flow.count, flow.cost) for tenant, flow in first}

    def part(self, tenant: str) -> float:
        """What a tenant gets of all that is served, if it waits with those that do now: a weight among weights."""
        own = self._weights.get(tenant, 1.0)
        return own / (own + sum(self._weights.get(other, 1.0) for other in self._flows if other != tenant))

    def push(self, tenant: str, lane: Hashable, priority: int, cost: float, item: ItemT) -> Entry[ItemT]:
        """Joins the queue; smaller priorities leave sooner. O(log n)."""
        flow = self._flows.get(tenant)
        if flow is None:
            start = max(self._virtual, self._ahead.pop(tenant, 0.0))
            flow = self._flows[tenant] = _Flow(start, next(self._numbers))
        if lane not in flow.lanes:
            flow.lanes[lane] = []
            self._stand(tenant, flow, lane)
        entry = Entry(tenant, lane, priority, max(_LEAST_COST, cost), next(self._numbers), item)
        heappush(flow.lanes[lane], entry)
        flow.count += 1
        flow.cost += entry.cost
        self._count += 1
        self.cost += entry.cost
        return entry

    def take(self, entry: Entry[ItemT]) -> None:
        """Leaves the queue, served: its tenant is charged."""
        flow = self._flows[entry.tenant]
        self._virtual = max(self._virtual, flow.start)
        flow.start += entry.cost / self._weights.get(entry.tenant, 1.0)
        for lane in flow.lanes:
            self._stand(entry.tenant, flow, lane)
        self.drop(entry)

    def drop(self, entry: Entry[ItemT]) -> None:
        """Leaves the queue, not served. Nothing if it has left."""
        if not entry.waits:
            return
        entry.waits = False
        flow = self._flows[entry.tenant]
        flow.count -= 1
        flow.cost -= entry.cost
        self._count -= 1
        self.cost -= entry.cost
        if not self._count:
            self._clear()
        elif not flow.count:
            del self._flows[entry.tenant]
            if flow.start > self._virtual:
                self._ahead[entry.tenant] = flow.start
                self._forget()

    def heads(self, most: int) -> list[Entry[ItemT]]:
        """Of each lane the first entries of the `most` tenants that are furthest behind; these tenants' first."""
        found: list[tuple[float, int, Entry[ItemT]]] = []
        for lane, order in list(self._orders.items()):
            valid: dict[str, tuple[float, int, str]] = {}
            while order and len(valid) < most:
                record = heappop(order)
                start, _, tenant = record
                flow = self._flows.get(tenant)
                if flow is None or flow.start != start or tenant in valid or (head := flow.head(lane)) is None:
                    continue
                valid[tenant] = record
                found.append((start, flow.number, head))
            for record in valid.values():
                heappush(order, record)
            if not order:
                del self._orders[lane]
        return [entry for _, _, entry in sorted(found)]

    def _stand(self, tenant: str, flow: _Flow[ItemT], lane: Hashable) -> None:
        heappush(self._orders.setdefault(lane, []), (flow.start, next(self._numbers), tenant))

    def _forget(self) -> None:
        """Of tenants without entries those that took most stay known."""
        if len(self._ahead) > _MAX_AHEAD:
            latest = sorted(self._ahead.items(), key=lambda item: item[1])[-_MAX_AHEAD // 2 :]
            self._ahead = {tenant: start for tenant, start in latest if start > self._virtual}
