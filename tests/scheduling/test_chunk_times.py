"""What a step took, by when the scheduler is called: engines that wait, that do not, and that run a step ahead."""

from __future__ import annotations

from typing import Any

from deepinfer_costmodel.step import Load
from deepinfer_vllm.scheduling.step_times import Step, StepTimes


def step(began_s: float, decodes: int = 1) -> Step:
    return Step(object(), Load(decodes=decodes), 0.0, began_s)


def ended(times: StepTimes, one: Step, now_s: float, running: bool = True) -> Any:
    found = times.ended(one.key, now_s)
    times.goes_on(running)
    return None if found is None else (found[0], round(found[1], 6))


def test_what_lies_between_two_steps_belongs_to_the_second() -> None:
    times, first, second = StepTimes(), step(10.0), step(10.6)
    times.scheduled(first)
    assert ended(times, first, 10.5) == (first, 0.5)
    times.scheduled(second)
    assert ended(times, second, 11.0) == (second, 0.5)


def test_an_idle_time_belongs_to_none() -> None:
    times, first, second = StepTimes(), step(10.0), step(20.0)
    times.scheduled(first)
    ended(times, first, 10.5, running=False)
    times.scheduled(second)
    assert ended(times, second, 20.25) == (second, 0.25)


def test_nor_do_steps_without_tokens() -> None:
    """Requests wait for their blocks: the engine asks again and again, and computes nothing."""
    times, first, empty, second = StepTimes(), step(10.0), step(11.0, decodes=0), step(20.0)
    times.scheduled(first)
    ended(times, first, 10.5)
    times.scheduled(empty)
    ended(times, empty, 11.1)
    times.scheduled(step(12.0, decodes=0))
    times.scheduled(second)
    assert ended(times, second, 20.25) == (second, 0.25)


def test_with_a_step_in_flight_the_next_begins_where_it_ends() -> None:
    times, first, second, third = StepTimes(), step(10.0), step(10.1), step(10.6)
    times.scheduled(first)
    times.scheduled(second)
    assert ended(times, first, 10.5) == (first, 0.5)
    times.scheduled(third)
    assert ended(times, second, 11.0, running=False) == (second, 0.5)
    assert ended(times, third, 11.25) == (third, 0.25)  # it was under way when nothing else was left


def test_steps_whose_end_nobody_tells_are_passed_over() -> None:
    times, lost, second = StepTimes(), step(10.0), step(11.0)
    times.scheduled(lost)
    times.scheduled(second)
    assert ended(times, second, 11.5) == (second, 0.5)
    assert times.ended(object(), 12.0) is None
