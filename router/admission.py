"""Where requests wait for room: fairly by tenant and predicted cost, bounded, with deadlines."""

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable
from math import ceil
from typing import Any, TypeVar

from deepinfer_router.admission_config import AdmissionConfig
from deepinfer_router.drain_rate import DrainRate
from deepinfer_router.errors import Refusal
from deepinfer_router.fair_queue import Entry, FairQueue
from deepinfer_router.metrics import REGISTRY, counter, gauge, histogram
from deepinfer_router.work import Work

PlacedT = TypeVar("PlacedT")

_TENANTS = 4  # the first of so many are tried in each lane when something has room
_PATIENCE = 3.0  # times its own cost a request may wait
_SHOWN = 100
_PLACED_AT_ONCE = 64
_TICK_S = 0.25  # what waits is tried again this often, should nobody say that there is room

_ENDS = counter("admission", "Requests by how they came past admission or did not.", "outcome")
AT_ONCE = _ENDS.labels("at_once")
_WAITED = _ENDS.labels("waited")
_WAIT = histogram("admission_wait_seconds", "How long those waited that were not placed at once.").labels()
_WAITING = gauge("admission_waiting", "Requests that wait for room.").labels()
_COST = gauge("admission_waiting_cost_seconds", "Predicted seconds of prefill of those that wait.").labels()


class _Waiter:
    """A request that waits, and what its task is told."""

    __slots__ = ("done", "place", "since", "timer")

    def __init__(self, place: Callable[[], Any], done: "asyncio.Future[Any]", since: float) -> None:
        self.place = place
        self.done = done
        self.since = since
        self.timer: asyncio.TimerHandle | None = None


class Admission:
    """Lets a request through when something has room for it. On the event loop's thread."""

    def __init__(self, config: AdmissionConfig, lane: Callable[[Work], Hashable] = lambda work: work.model) -> None:
        """`lane`: works of one lane need the same engines; if there is no room for one, there hardly is for others."""
        self._config = config
        self._lane = lane
        self._queue: FairQueue[_Waiter] = FairQueue(config.tenant_weights)
        self._in_lane: Counter[Hashable] = Counter()
        self._rate = DrainRate()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False
        self._ticker: asyncio.TimerHandle | None = None
        self._closed = False
        self.on_waiting: Callable[[bool], None] | None = None
        """Told when the first begins to wait and the last has ceased to: only in between `pump` does anything."""
        REGISTRY.before_snapshot(self._show)

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def waiting_seconds(self) -> float:
        """Their predicted seconds of prefill."""
        return self._queue.cost

    def queues(self) -> dict[str, tuple[int, float]]:
        """Of the tenants with most requests that wait, how many and their seconds."""
        return self._queue.largest(_SHOWN)

    async def admit(
        self,
        work: Work,
        cost_s: float,
        place: Callable[[], PlacedT | None],
        give_back: Callable[[PlacedT], object],
    ) -> PlacedT:
        """What `place()` answers, at once or when something has room.

        `place` finds room and books it, or returns None; it is called again whenever there may be room. What it raises,
        the caller gets. `give_back` takes back what was booked for a caller that was cancelled in that very moment.
        `cost_s`: what the tenant is charged, predicted seconds.

        Raises:
            Refusal: 429 with `retry_after_s` where too many wait or it has waited too long, 504 after `work.deadline`,
                503 when the router stops.
        """
        if self.at_once(work):
            placed = place()
            if placed is not None:
                AT_ONCE.inc()
                return placed
        return await self.wait(work, cost_s, place, give_back)

    def at_once(self, work: Work) -> bool:
        """Whether nobody waits whom `work` would overtake."""
        return not self._in_lane or not self._in_lane[self._lane(work)]  # that of nobody is empty

    def pump(self) -> None:
        """Something may have room: what waits is tried, soon. Cheap; call it from anywhere on the loop's thread."""
        if self._in_lane and not self._scheduled and self._loop is not None:
            self._scheduled = True
            self._loop.call_soon(self._run)

    def close(self) -> None:
        """Refuses those that wait and those that would have to."""
        if self._closed:
            return
        self._closed = True
        while self._queue:
            for entry in self._queue.heads(_TENANTS):
                self._refuse(entry, _stopping())
        REGISTRY.forget_refresh(self._show)

    async def wait(
        self,
        work: Work,
        cost_s: float,
        place: Callable[[], PlacedT | None],
        give_back: Callable[[PlacedT], object],
    ) -> PlacedT:
        """`admit` of what cannot be placed `at_once`."""
        loop = self._loop = asyncio.get_running_loop()
        now = loop.time()
        if (refusal := self._refusal(work, cost_s, now)) is not None:
            _ENDS.labels(refusal.code).inc()
            raise refusal
        waiter = _Waiter(place, loop.create_future(), now)
        self._rate.pass_to(now)
        lane = self._lane(work)
        entry = self._queue.push(work.tenant, lane, work.priority, cost_s, waiter)
        if not self._in_lane and self.on_waiting is not None:
            self.on_waiting(True)
        self._in_lane[lane] += 1
        until = now + max(self._config.max_wait_s, _PATIENCE * cost_s)
        if work.deadline is not None and work.deadline < until:
            waiter.timer = loop.call_at(work.deadline, self._refuse, entry, _too_late())
        else:
            waiter.timer = loop.call_at(until, self._waited_too_long, entry)
        if self._ticker is None:
            self._ticker = loop.call_later(_TICK_S, self._tick)
        try:
            placed: PlacedT = await waiter.done
        except BaseException:
            if entry.waits:
                self._queue.drop(entry)
                self._left(entry, "cancelled")
            elif (
                not waiter.done.cancelled() and waiter.done.exception() is None
            ):  # placed and cancelled before it could run
                give_back(waiter.done.result())
            raise
        return placed

    def _run(self) -> None:
        """Tries heads in fair order until nothing has room; a few dozen, then others have the loop."""
        self._scheduled = False
        now = asyncio.get_running_loop().time()
        failed: set[Entry[_Waiter]] = set()
        held: set[Hashable] = set()
        for _ in range(_PLACED_AT_ONCE):
            for entry in self._queue.heads(_TENANTS):
                if entry in failed or entry.lane in held:
                    continue
                if self._try(entry, now):
                    break  # another is next now
                failed.add(entry)
                if now - entry.item.since >= self._config.hold_after_s:
                    held.add(entry.lane)
            else:
                return
        self.pump()

    def _try(self, entry: Entry[_Waiter], now: float) -> bool:
        """Whether the entry has left the queue."""
        waiter = entry.item
        if waiter.done.done():  # cancelled, and its task has not run yet
            return False
        try:
            placed = waiter.place()
        except Exception as error:
            self._refuse(entry, error)
            return True
        if placed is None:
            return False
        self._rate.took(entry.cost, now)
        self._queue.take(entry)
        self._left(entry, "")
        _WAITED.inc()
        _WAIT.observe(now - waiter.since)
        waiter.done.set_result(placed)
        return True

    def _tick(self) -> None:
        self._ticker = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        self._run()

    def _left(self, entry: Entry[_Waiter], outcome: str) -> None:
        """Gives up all that a waiter has but its place in the queue."""
        if entry.item.timer is not None:
            entry.item.timer.cancel()
        self._in_lane[entry.lane] -= 1
        if not self._in_lane[entry.lane]:
            del self._in_lane[entry.lane]
            if not self._in_lane and self.on_waiting is not None:
                self.on_waiting(False)
        if outcome:
            _ENDS.labels(outcome).inc()
        if not self._queue:
            self._rate.idle()
            if self._ticker is not None:
                self._ticker.cancel()
                self._ticker = None

    def _refuse(self, entry: Entry[_Waiter], error: Exception) -> None:
        if not entry.waits:
            return
        self._queue.drop(entry)
        self._left(entry, error.code if isinstance(error, Refusal) else "failed")
        if not entry.item.done.done():
            entry.item.done.set_exception(error)

    def _waited_too_long(self, entry: Entry[_Waiter]) -> None:
        seconds = self._retry_after(entry.tenant, 0.0)
        waited_s = asyncio.get_running_loop().time() - entry.item.since
        message = f"no engine had room within {waited_s:.3g} s (admission.max_wait_s); try again in {seconds} s"
        self._refuse(entry, Refusal(429, "queue_timeout", message, retry_after_s=seconds))

    def _refusal(self, work: Work, cost_s: float, now: float) -> Refusal | None:
        """Why it may not even wait."""
        if self._closed:
            return _stopping()
        if work.deadline is not None and work.deadline <= now:
            return _too_late()
        config, queue = self._config, self._queue
        count, _ = queue.of(work.tenant)
        if len(queue) >= config.max_waiting:
            code, what = "queue_full", f"{len(queue)} requests wait, and no more may (admission.max_waiting)"
        elif count >= config.max_waiting_of_a_tenant:
            code = "tenant_queue_full"
            what = f"{count} requests of this tenant wait, and no more may (admission.max_waiting_of_a_tenant)"
        elif queue and queue.cost + cost_s > config.max_waiting_cost_s:
            code, what = (
                "queue_full",
                f"{queue.cost:.0f} s of work wait, and no more may (admission.max_waiting_cost_s)",
            )
        else:
            return None
        seconds = self._retry_after(work.tenant, cost_s)
        return Refusal(429, code, f"{what}; try again in {seconds} s", retry_after_s=seconds)

    def _retry_after(self, tenant: str, cost_s: float) -> int:
        """Whole seconds in which what is before it is predicted to have left: its tenant's by its part, or all."""
        _, own_s = self._queue.of(tenant)
        before_s = min(self._queue.cost, (own_s + cost_s) / self._queue.part(tenant))
        seconds = self._rate.seconds_for(before_s)
        return ceil(min(self._config.max_retry_after_s, max(1.0, seconds or 0.0)))

    def _show(self) -> None:
        _WAITING.set(len(self._queue))
        _COST.set(self._queue.cost)


def _stopping() -> Refusal:
    return Refusal(503, "shutting_down", "the router is stopping and starts nothing more; ask again")


def _too_late() -> Refusal:
    return Refusal(504, "deadline_exceeded", "the request's deadline passed before an engine had room for it")
