"""Steps under way on a device, and what became of their drafts as it arrives."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deepinfer_vllm.spec_decode.arrivals import Arrival, Moment

Floats: TypeAlias = NDArray[np.floating]
Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class Step:
    """What the host knew as it launched a step of R requests; S: draft positions."""

    ids: list[str]
    slots: Ints
    """[R]: places in the runner's request state."""
    drafts: Ints
    """[R]: drafts that it verifies."""
    samples: NDArray[np.bool_]
    """[R]: whose prompt is complete with it."""
    drafted: bool
    """Whether it drafts for the next."""
    tokens: int
    context_tokens: int
    predicted_s: float
    """0 if nothing was decided about it."""
    usual: bool
    """Whether its times tell what tokens cost."""
    began: Moment
    sampled: Moment
    arrival: Arrival
    """Of tokens sampled [R] and confidences [R, S]."""


class Outcome(NamedTuple):
    """What became of a step, of its R requests."""

    step: Step
    confidences: Floats
    """[R, S]: of the drafts it verified."""
    drafts: Ints
    """[R]: of these as many as confidences are known of."""
    accepted: Ints
    """[R]"""
    drawn: Floats
    """[R, S]: confidences of the drafts it made."""
    still: NDArray[np.bool_]
    """[R]: whose slot has had no other request since."""


class Ledger:
    """Steps in the order they were launched. One thread; it waits only where it is told to."""

    def __init__(self, slots: int, positions: int, bonus_tokens: int) -> None:
        self._bonus = bonus_tokens
        self._under_way: deque[tuple[Step, Ints]] = deque()
        self._tenant: Ints = np.zeros(slots, np.int64)
        """How many requests each slot has had."""
        self._confidences: Floats = np.zeros((slots, positions), np.float32)
        """Of each slot's latest block that has arrived."""
        self._of = np.full(slots, -1)
        """The tenant that block was drafted for; -1 for none."""

    def add_request(self, slot: int) -> None:
        """A request comes to a slot, or comes back to one."""
        self._tenant[slot] += 1

    def launched(self, step: Step) -> None:
        """The device has the whole step in its queue."""
        self._under_way.append((step, self._tenant[step.slots]))

    def arrived(self, *, keep: int, wait: bool) -> Iterator[Outcome]:
        """Outcomes of steps that are done, but not of the newest `keep`; of all others, if it is to `wait`."""
        while len(self._under_way) > keep:
            step, tenants = self._under_way[0]
            if wait:
                step.arrival.moment.synchronize()
            elif not step.arrival.moment.query():
                return
            self._under_way.popleft()
            yield self._read(step, tenants)

    def _read(self, step: Step, tenants: Ints) -> Outcome:
        sampled, drawn = step.arrival.arrays()
        confidences = self._confidences[step.slots]
        drafts = np.where(self._of[step.slots] == tenants, step.drafts, 0)
        accepted = np.clip(sampled.astype(np.int64) - self._bonus, 0, drafts)
        made = step.samples if step.drafted else np.zeros(len(tenants), bool)
        self._confidences[step.slots[made]] = drawn[made]
        self._of[step.slots] = np.where(made, tenants, -1)
        return Outcome(step, confidences, drafts, accepted, drawn, self._tenant[step.slots] == tenants)
