"""Times of steps, on a clock that the test turns."""

from typing import Any

from deepinfer_vllm.spec_decode.shared_times import SHARED_EVERY, SharedTimes
from deepinfer_vllm.spec_decode.step_times import StepTimes


class Learner:
    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def observe_verify(self, tokens: int, context_tokens: int, seconds: float) -> None:
        self.told.append(("verify", tokens, context_tokens, seconds))

    def observe_plain(self, requests: int, context_tokens: int, seconds: float) -> None:
        self.told.append(("plain", requests, context_tokens, seconds))

    def observe_draft(self, requests: int, context_tokens: int, seconds: float) -> None:
        self.told.append(("draft", requests, context_tokens, seconds))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Group:
    """Two ranks in one process; rank 0 speaks first."""

    world_size = 2

    def __init__(self) -> None:
        self.said: list[Any] = []

    def of(self, rank: int) -> Any:
        return type("Rank", (), {"world_size": 2, "broadcast_object": lambda _, obj, src=0: self._pass(rank, obj)})()

    def _pass(self, rank: int, obj: Any) -> Any:
        if rank == 0:
            self.said.append(obj)
        return self.said[-1]


def step(
    times: StepTimes, clock: Clock, target_s: float, draft_s: float, requests: list[str], *, usual: bool = True
) -> None:
    times.began(usual=usual)
    clock.now += target_s
    times.sampled()
    clock.now += draft_s
    times.ended(requests, tokens=8, context_tokens=100, drafted_for=len(requests) if draft_s else 0)


def test_both_parts_of_a_step() -> None:
    learner, clock = Learner(), Clock()
    times = StepTimes(SharedTimes(learner), clock)
    step(times, clock, 4.0, 1.0, ["a", "b"])
    assert learner.told == [("verify", 8, 100, 4.0), ("draft", 2, 100, 1.0)] and times.measured_s == 4.0


def test_what_the_engine_does_between_steps_of_a_request_belongs_to_the_second() -> None:
    learner, clock = Learner(), Clock()
    times = StepTimes(SharedTimes(learner), clock)
    step(times, clock, 4.0, 0.0, ["a"])
    clock.now += 0.5
    step(times, clock, 4.0, 0.0, ["a", "b"])
    clock.now += 60.0  # both have ended, nobody asked for anything
    step(times, clock, 4.0, 0.0, ["c"])
    assert [seconds for *_, seconds in learner.told] == [4.0, 4.5, 4.0]


def test_a_step_that_encodes_images_says_nothing_of_tokens() -> None:
    learner, clock = Learner(), Clock()
    times = StepTimes(SharedTimes(learner), clock)
    step(times, clock, 40.0, 1.0, ["a"], usual=False)
    assert learner.told == [("draft", 1, 100, 1.0)] and times.measured_s == 0.0


def test_ranks_with_different_clocks_are_told_the_same_at_the_same_steps() -> None:
    group, learners, clocks = Group(), [Learner(), Learner()], [Clock(), Clock()]
    ranks = [StepTimes(SharedTimes(learners[i], group.of(i)), clocks[i]) for i in range(2)]
    for number in range(3 * SHARED_EVERY):
        for i, times in enumerate(ranks):
            step(times, clocks[i], 4.0 + 3 * i, 1.0 + number * i, ["a"])
        assert learners[0].told == learners[1].told
    assert len(group.said) == 3
    # The last step before each meeting is still to be told.
    assert learners[0].told == [("verify", 8, 100, 4.0), ("draft", 1, 100, 1.0)] * (3 * SHARED_EVERY - 1)


def test_steps_without_drafts_are_told_apart() -> None:
    """Of one token a request; those with a prompt have its tokens to compute, as a step with drafts has."""
    learner, clock = Learner(), Clock()
    times = StepTimes(SharedTimes(learner), clock)
    for tokens, drafts in ((2, False), (2, True), (9, False)):
        times.began(usual=True)
        clock.now += 1.0
        times.sampled()
        times.ended(["a", "b"], tokens=tokens, context_tokens=5, drafted_for=0, drafts=drafts)
    assert [told[:2] for told in learner.told] == [("plain", 2), ("verify", 2), ("verify", 9)]
