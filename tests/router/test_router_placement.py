"""Where requests are put: what the policies answer, booked."""

from random import Random

from deepinfer_router.decode import DecodePolicy
from deepinfer_router.engine_costs import EngineCosts
from deepinfer_router.engine_spec import EngineSpec
from deepinfer_router.fleet import Fleet
from deepinfer_router.fleet_config import FleetConfig
from deepinfer_router.placement import Placer
from deepinfer_router.prefill import PrefillPolicy
from deepinfer_router.prefill_config import PrefillConfig
from deepinfer_router.roles import Role
from deepinfer_router.target import Target
from deepinfer_router.work import Work

LONG = 10_000


def made(**roles: tuple[Role, ...]) -> tuple[Placer, dict[str, Target], Fleet]:
    """A placer over engines by id, each of 100,000 KV tokens; half a minute of prefill is enough to do."""
    fleet = Fleet(FleetConfig(slow_start_s=0), clock=lambda: 100.0)
    for id, has in roles.items():
        fleet.add(EngineSpec(f"http://{id}", id=id, roles=frozenset(has), capacity_tokens=100_000))
    config = PrefillConfig(max_pending_s=30.0)
    prefill = PrefillPolicy(config, EngineCosts.from_config(config))
    placer = Placer(fleet, prefill, DecodePolicy(), local_tokens=256, clock=lambda: 100.0, rng=Random(0))
    return placer, {id: engine.targets[0] for id, engine in fleet.engines.items()}, fleet


BOTH = (Role.PREFILL, Role.DECODE)


def test_two_engines_share_a_request() -> None:
    placer, targets, _ = made(p=(Role.PREFILL,), d=(Role.DECODE,))
    placed = placer.place(Work(prompt_tokens=LONG, expected_output=7), True)
    assert placed is not None and placed.prefill is not None
    assert (placed.prefill.target, placed.decode.target) == (targets["p"], targets["d"])
    assert (targets["p"].kv_tokens, targets["d"].kv_tokens) == (LONG, LONG + 7)
    assert targets["p"].pending_seconds > 0 == targets["d"].pending_seconds
    placed.release("done")
    assert [target.active for target in targets.values()] == [0, 0]


def test_a_short_rest_is_prefilled_where_it_is_decoded() -> None:
    placer, targets, _ = made(p=(Role.PREFILL,), d=(Role.DECODE,))
    placed = placer.place(Work(prompt_tokens=LONG, hit_tokens=LONG - 256), True)
    assert placed is not None and placed.prefill is None and placed.decode.target is targets["d"]


def test_while_prefill_has_enough_to_do_nothing_is_pushed_to_decode() -> None:
    placer, targets, _ = made(p=(Role.PREFILL,), d=(Role.DECODE,))
    targets["p"].pending_seconds = 31.0
    assert placer.place(Work(prompt_tokens=LONG), True) is None
    assert targets["d"].active == 0
    # One that has failed before must not wait again.
    placed = placer.place(Work(prompt_tokens=LONG, excluded=("other",)), True)
    assert placed is not None and placed.prefill is not None


def test_without_engines_to_prefill_decode_does_it() -> None:
    placer, targets, fleet = made(p=(Role.PREFILL,), d=(Role.DECODE,))
    fleet.drain("p")
    placed = placer.place(Work(prompt_tokens=LONG), True)
    assert placed is not None and placed.prefill is None and placed.decode.target is targets["d"]
    fleet.resume("p")
    placed = placer.place(Work(prompt_tokens=LONG, excluded=("p",)), True)
    assert placed is not None and placed.prefill is None and placed.decode.target is targets["d"]


def test_without_room_to_decode_nothing_is_booked() -> None:
    placer, targets, _ = made(p=(Role.PREFILL,), d=(Role.DECODE,))
    targets["d"].active, targets["d"].kv_tokens = 1, 85_000
    assert placer.place(Work(prompt_tokens=LONG), True) is None
    assert targets["p"].active == 0


def test_a_whole_request_goes_where_there_is_room() -> None:
    placer, targets, _ = made(a=BOTH, b=BOTH)
    targets["a"].active, targets["a"].kv_tokens = 1, 85_000
    targets["b"].active, targets["b"].pending_seconds = 1, 5.0
    placed = placer.place(Work(prompt_tokens=LONG), True)
    assert placed is not None and placed.decode.target is targets["b"] and placed.pick.reason == "room"
    targets["b"].kv_tokens = 85_000
    assert placer.place(Work(prompt_tokens=LONG), True) is None


def test_what_is_not_decoded_waits_for_nobody() -> None:
    """Where every engine has more prefill than a request waits for here, lists of models and embeddings were a 503."""
    placer, targets, fleet = made(a=BOTH, b=BOTH)
    targets["a"].pending_seconds, targets["b"].pending_seconds = 40.0, 31.0
    assert placer.place(Work(prompt_tokens=LONG), True) is None
    placed = placer.any(Work())
    assert placed is not None and placed.decode.target is targets["b"]
    fleet.drain("a")
    fleet.drain("b")
    assert placer.any(Work()) is None
