"""Slots: runs, quarantine, and no slot that is lost or given twice."""

import random

from deepinfer_kvstore.entry import Location
from deepinfer_kvstore.slots import Run, Slots


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_consecutive_slots_come_as_one_run() -> None:
    slots = Slots(1.0)
    slots.add(1, 0, 8)
    assert slots.take(3) == [Run(1, 0, 0, 3)]
    assert slots.take(4) == [Run(1, 0, 3, 4)]
    assert slots.take(4) == [Run(1, 0, 7, 1)]
    assert slots.take(1) == []


def test_scattered_slots_come_in_few_runs() -> None:
    slots = Slots(1.0)
    slots.add(1, 0, 8, live=[(2, 1), (5, 1)])
    assert sorted(slots.take(99)) == [Run(1, 0, 0, 2), Run(1, 0, 3, 2), Run(1, 0, 6, 2)]
    assert slots.counts() == (0, 8, 0)


def test_the_emptiest_slab_is_next() -> None:
    slots = Slots(1.0)
    slots.add(1, 0, 4, live=[(0, 1), (1, 1)])
    slots.add(1, 1, 4, live=[(0, 1)])
    assert slots.take(3) == [Run(1, 1, 1, 3)]
    assert slots.take(3) == [Run(1, 0, 2, 2)]


def test_a_retired_slot_rests_before_it_is_given_again() -> None:
    clock = Clock()
    slots = Slots(10.0, clock)
    slots.add(1, 0, 2)
    slots.take(2)
    slots.fill(Location(1, 0, 1, 77))
    assert not slots.retire(Location(1, 0, 1, 76)), "the block before"
    assert slots.retire(Location(1, 0, 1, 77))
    assert not slots.retire(Location(1, 0, 1, 77)), "it is free already"
    assert not slots.retire(Location(2, 0, 0, 0)) and not slots.retire(Location(1, 0, 99, 0)), "not ours"
    assert slots.take(1) == [] and slots.counts() == (0, 1, 1)
    clock.now = 10.0
    assert slots.counts() == (1, 1, 0)
    assert slots.take(1) == [Run(1, 0, 1, 1)]


def test_a_clock_that_jumps_back_only_prolongs_the_rest() -> None:
    clock = Clock()
    slots = Slots(10.0, clock)
    slots.add(1, 0, 1)
    slots.take(1)
    clock.now = 1000.0
    slots.retire(Location(1, 0, 0, 0))
    clock.now = 0.0
    assert slots.take(1) == []


def test_an_empty_slab_can_go_and_a_used_one_cannot() -> None:
    slots = Slots(10.0)
    slots.add(1, 0, 2)
    slots.add(1, 1, 2)
    (run,) = slots.take(1)
    slots.retire(Location(run.writer, run.slab, run.first, 0))
    (other,) = slots.take(1)
    assert other.slab == run.slab
    assert not slots.remove(1, run.slab)
    assert slots.remove(1, 1 - run.slab) and not slots.remove(1, 1 - run.slab)
    assert slots.slabs() == [(1, run.slab)]
    slots.give_back(other)
    assert slots.remove(1, run.slab)
    assert slots.take(1) == [] and slots.counts() == (0, 0, 0)


def test_exhaustion_answers_at_once_and_ends_with_the_first_freed_slot() -> None:
    """# LMCache#2942"""
    slots = Slots(0.0)
    slots.add(1, 0, 64)
    (run,) = slots.take(64)
    assert slots.take(1) == []
    slots.give_back(Run(1, 0, 7, 1))
    assert slots.take(64) == [Run(1, 0, 7, 1)]


def test_every_slot_is_free_taken_or_resting_after_random_use() -> None:
    """# LMCache#4546"""
    chance, clock = random.Random(3), Clock()
    slots = Slots(5.0, clock)
    taken: set[tuple[int, int, int]] = set()
    slabs = 0
    for _ in range(3000):
        clock.now += chance.random()
        action = chance.random()
        if action < 0.02 and slabs < 6:
            slots.add(1, slabs, 16)
            slabs += 1
        elif action < 0.5:
            for run in slots.take(chance.randrange(1, 12)):
                new = {(run.writer, run.slab, slot) for slot in range(run.first, run.first + run.slots)}
                assert len(new) == run.slots and not new & taken and run.first + run.slots <= 16
                taken |= new
        elif taken:
            writer, slab, slot = chance.choice(sorted(taken))
            taken.discard((writer, slab, slot))
            if action < 0.6:
                slots.give_back(Run(writer, slab, slot, 1))
            else:
                assert slots.retire(Location(writer, slab, slot, 0))
        free, live, resting = slots.counts()
        assert live == len(taken) and free + live + resting == 16 * slabs
        assert live == sum(len(slots.taken(*slab)) for slab in slots.slabs())
    clock.now += 5.0
    assert slots.counts() == (16 * slabs - len(taken), len(taken), 0)
