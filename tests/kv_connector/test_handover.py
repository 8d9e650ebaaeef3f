"""What is kept and who waits when one engine continues another's prompt; the clock is the test's."""

import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from deepinfer_vllm.kv_connector.handover import LOOK_SECONDS, AnswerGate, ArrivalWait, stored_tokens
from deepinfer_vllm.kv_connector.metrics import Growth


class Clock:
    """Seconds that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def output(request_id: str, token: int, finish: FinishReason | None = None) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, [token], finish_reason=finish)


def ids(outputs: dict[int, EngineCoreOutputs]) -> dict[int, list[tuple[str, int]]]:
    return {client: [(o.request_id, o.new_token_ids[0]) for o in step.outputs] for client, step in outputs.items()}


def test_last_output_waits_for_the_store_and_no_other_does() -> None:
    stored: set[str] = set()
    gate = AnswerGate(stored.__contains__, lambda _: None, 2.0, clock=Clock())
    first = {0: EngineCoreOutputs(outputs=[output("a", 1), output("b", 2)])}
    gate.pass_through(first)
    assert ids(first) == {0: [("a", 1), ("b", 2)]}
    gate.hold("a")
    last = [output("a", 3, FinishReason.LENGTH), output("b", 4, FinishReason.STOP)]
    step = {0: EngineCoreOutputs(outputs=last)}
    gate.pass_through(step)
    assert ids(step) == {0: [("b", 4)]}
    assert gate.pending()
    stored.add("a")
    empty: dict[int, EngineCoreOutputs] = {}
    gate.pass_through(empty)
    assert ids(empty) == {0: [("a", 3)]}
    assert not gate.pending() and gate.late == 0


def test_stored_at_once_is_answered_at_once_to_its_own_client() -> None:
    gate = AnswerGate(lambda _: True, lambda _: None, 2.0, clock=Clock())
    gate.hold("a")
    step = {1: EngineCoreOutputs(outputs=[output("a", 3, FinishReason.LENGTH)]), 2: EngineCoreOutputs()}
    gate.pass_through(step)
    assert ids(step) == {1: [("a", 3)], 2: []}


def test_a_store_that_hangs_holds_no_answer_for_long() -> None:
    clock, given_up = Clock(), list[str]()
    gate = AnswerGate(lambda _: False, given_up.append, 2.0, clock=clock)
    gate.hold("a")
    gate.pass_through({0: EngineCoreOutputs(outputs=[output("a", 3, FinishReason.LENGTH)])})
    clock.now += 1.9
    step = {0: EngineCoreOutputs(outputs=[output("b", 1)])}
    gate.pass_through(step)
    assert ids(step) == {0: [("b", 1)]}
    clock.now += 0.2
    gate.pass_through(step)
    assert ids(step) == {0: [("b", 1), ("a", 3)]}
    assert gate.late == 1 and given_up == ["a"] and not gate.pending()


def test_request_waits_until_all_it_expects_is_there() -> None:
    clock = Clock()
    wait = ArrivalWait(2.0, clock=clock)
    assert not wait.too_early("a")
    assert wait.waits("a", 64, 128)
    assert wait.too_early("a")
    clock.now += LOOK_SECONDS
    assert not wait.too_early("a")
    assert not wait.waits("a", 128, 128)
    assert not wait.too_early("a") and wait.missed == 0


def test_request_that_waits_in_vain_does_so_once() -> None:
    clock = Clock()
    wait = ArrivalWait(2.0, clock=clock)
    assert wait.waits("a", 0, 128)
    clock.now += 2.0
    assert not wait.waits("a", 0, 128)
    assert not wait.waits("a", 0, 128) and not wait.too_early("a")
    assert wait.missed == 1
    wait.forget("a")
    assert wait.waits("a", 0, 128)


def test_no_patience_is_no_wait() -> None:
    assert not ArrivalWait(0.0, clock=Clock()).waits("a", 0, 128)


@pytest.mark.parametrize(
    ("params", "tokens"),
    [
        ({"kvstore": {"stored_tokens": 128}}, 128),
        ({"kvstore": {"stored_tokens": -1}}, 0),
        ({"kvstore": {"stored_tokens": True}}, 0),
        ({"kvstore": {"stored_tokens": "128"}}, 0),
        ({"kvstore": 5}, 0),
        ([], 0),
        (None, 0),
    ],
)
def test_what_is_said_to_be_stored_is_read_with_care(params: object, tokens: int) -> None:
    assert stored_tokens(params) == tokens


def test_counts_are_reported_as_they_grow() -> None:
    growth, late = Growth(), ("handovers", ("answer_late",))
    assert growth.take({late: 0}).is_empty()
    assert growth.take({late: 2}).data["data"] == {"vllm:deepinfer_kv_handovers": {("answer_late",): 2}}
    assert growth.take({late: 2}).is_empty()
    assert growth.take({late: 3}).data["data"] == {"vllm:deepinfer_kv_handovers": {("answer_late",): 1}}
