"""Finished requests answered when what they have stored can be read, instead of at once."""

import functools
from typing import Any


def hold_answers() -> None:
    """Let a connector with an `answer_gate` say when the last output of a request leaves the engine.

    A connector can keep a request's blocks after its end, not its answer; yet who is told of a finished prefill goes on
    with it elsewhere. Connectors inside a MultiConnector are asked too.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    update = Scheduler.update_from_output
    if hasattr(update, "deepinfer_hooked"):
        return

    @functools.wraps(update)
    def update_and_hold(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = update(self, scheduler_output, model_runner_output)
        for connector in (self.connector, *getattr(self.connector, "sub_connectors", ())):
            if (gate := getattr(connector, "answer_gate", None)) is not None:
                gate.pass_through(outputs)
        return outputs

    update_and_hold.deepinfer_hooked = True  # type: ignore[attr-defined]
    Scheduler.update_from_output = update_and_hold
