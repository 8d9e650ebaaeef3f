"""The router's own counters, and what Prometheus' parser reads of them."""

import math
import sys
from collections.abc import Callable

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as PrometheusHistogram
from prometheus_client.parser import text_string_to_metric_families

from deepinfer_router import metrics
from deepinfer_router.exposition import expose, merge, only_growing
from deepinfer_router.metrics import MAX_CHILDREN, OVERFLOW, PREFIX, Registry

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(text: bytes) -> Samples:
    """What Prometheus' own parser finds."""
    return {
        (sample.name.removeprefix(PREFIX), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


@pytest.fixture
def registry() -> Registry:
    return Registry()


def test_what_is_counted_is_read(registry: Registry) -> None:
    requests = registry.counter("requests", "Requests.", "api")
    requests.labels("chat").inc()
    requests.labels("chat").inc(2)
    active = registry.gauge("active", "Now.").labels()
    active.inc(5)
    active.dec()
    assert read(expose(registry.snapshot())) == {("requests_total", (("api", "chat"),)): 3, ("active", ()): 4}


@given(st.lists(st.floats(-1, 700) | st.sampled_from(metrics.SECONDS)))
def test_a_histogram_says_what_prometheus_client_would(values: list[float]) -> None:
    registry, reference = Registry(), CollectorRegistry()
    ours = registry.histogram("wait_seconds", "Wait.").labels()
    theirs = PrometheusHistogram(PREFIX + "wait_seconds", "Wait.", registry=reference, buckets=metrics.SECONDS)
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    expected = {key: value for key, value in read(generate_latest(reference)).items() if "_created" not in key[0]}
    assert read(expose(registry.snapshot())) == expected


@given(st.text())
def test_any_label_value_comes_back(value: str) -> None:
    registry = Registry()
    registry.counter("seen", 'A "help" with \\ and\na line.', "tenant").labels(value).inc()
    found = list(text_string_to_metric_families(expose(registry.snapshot()).decode()))
    assert [sample.labels for family in found for sample in family.samples] == [{"tenant": value}]


def test_the_labels_of_a_family_are_bounded(registry: Registry) -> None:
    family = registry.counter("seen", "Seen.", "tenant", "code")
    for number in range(MAX_CHILDREN + 50):
        family.labels(f"t{number}", "x").inc()
    found = read(expose(registry.snapshot()))
    assert len(found) == MAX_CHILDREN + 1
    assert found["seen_total", (("code", OVERFLOW), ("tenant", OVERFLOW))] == 50


def test_what_is_removed_is_shown_no_more(registry: Registry) -> None:
    family = registry.gauge("kv_tokens", "Tokens.", "engine")
    family.labels("a").set(7)
    kept = family.labels("b")
    family.remove("b")
    family.remove("never there")
    kept.inc()
    assert read(expose(registry.snapshot())) == {("kv_tokens", (("engine", "a"),)): 7}


def test_gauges_are_set_when_somebody_looks(registry: Registry) -> None:
    gauge = registry.gauge("queue", "Waiting.").labels()

    def refresh() -> None:
        gauge.inc()

    registry.before_snapshot(refresh)
    registry.snapshot()
    assert read(expose(registry.snapshot()))["queue", ()] == 2
    registry.forget_refresh(refresh)
    assert read(expose(registry.snapshot()))["queue", ()] == 2


def worker(amount: float) -> Registry:
    registry = Registry()
    registry.counter("requests", "Requests.", "api").labels("chat").inc(amount)
    registry.counter("only", "One has it.", "worker_id").labels(str(amount)).inc()
    registry.histogram("wait_seconds", "Wait.", buckets=(1.0, 2.0)).labels().observe(amount)
    for how in ("sum", "max", "min", "mean"):
        registry.gauge(f"{how}_of_them", "Gauge.", merge=how).labels().set(amount)  # type: ignore[arg-type]
    return registry


def test_workers_are_added_up() -> None:
    travelled = [msgpack.unpackb(msgpack.packb(worker(amount).snapshot())) for amount in (1.5, 4.5)]
    found = read(expose(merge(travelled)))
    assert found == {
        ("requests_total", (("api", "chat"),)): 6,
        ("only_total", (("worker_id", "1.5"),)): 1,
        ("only_total", (("worker_id", "4.5"),)): 1,
        ("wait_seconds_bucket", (("le", "1.0"),)): 0,
        ("wait_seconds_bucket", (("le", "2.0"),)): 1,
        ("wait_seconds_bucket", (("le", "+Inf"),)): 2,
        ("wait_seconds_sum", ()): 6,
        ("wait_seconds_count", ()): 2,
        ("sum_of_them", ()): 6,
        ("max_of_them", ()): 4.5,
        ("min_of_them", ()): 1.5,
        ("mean_of_them", ()): 3,
    }


def test_merging_leaves_the_parts_as_they_were() -> None:
    parts = [worker(1).snapshot(), worker(2).snapshot()]
    before = msgpack.packb(parts)
    once = merge(parts)
    assert merge([once]) == once
    assert msgpack.packb(parts) == before


def test_of_a_dead_worker_only_what_grows_is_kept() -> None:
    found = read(expose(merge([worker(2).snapshot(), only_growing(worker(3).snapshot())])))
    assert found["requests_total", (("api", "chat"),)] == 5
    assert found["sum_of_them", ()] == 2


def test_other_buckets_do_not_mix() -> None:
    old, new = Registry(), Registry()
    old.histogram("wait_seconds", "Wait.", buckets=(1.0,)).labels().observe(0.5)
    new.histogram("wait_seconds", "Wait.", buckets=(1.0, 2.0)).labels().observe(0.5)
    assert read(expose(merge([new.snapshot(), old.snapshot()])))["wait_seconds_count", ()] == 1


def test_infinite_and_missing_numbers_are_read(registry: Registry) -> None:
    family = registry.gauge("ratio", "Ratio.", "of")
    for name, value in {"nan": math.nan, "inf": math.inf, "minus": -math.inf}.items():
        family.labels(name).set(value)
    found = read(expose(registry.snapshot()))
    assert math.isnan(found["ratio", (("of", "nan"),)])
    assert found["ratio", (("of", "inf"),)] == math.inf
    assert found["ratio", (("of", "minus"),)] == -math.inf


@pytest.mark.parametrize("name", ["Upper", "with-dash", "a b", "x_total", "x_bucket", "taken", "x\n"])
def test_a_name_that_prometheus_would_not_read_is_refused(registry: Registry, name: str) -> None:
    registry.counter("taken", "Taken.")
    with pytest.raises(ValueError, match="name|ends as"):
        registry.gauge(name, "Text.")


def test_labels_and_buckets_are_checked(registry: Registry) -> None:
    with pytest.raises(ValueError, match="'le'"):
        registry.counter("x", "Text.", "le")
    with pytest.raises(ValueError, match="must ascend"):
        registry.histogram("y_seconds", "Text.", buckets=(2.0, 1.0))
    with pytest.raises(ValueError, match="has labels"):
        registry.counter("z", "Text.", "api").labels()


def test_counting_is_cheap(registry: Registry) -> None:
    """Metrics on the path call next to nothing: they neither parse, lock nor format."""
    counter = registry.counter("c", "Text.").labels()
    histogram = registry.histogram("h_seconds", "Text.").labels()
    assert calls_of(counter.inc) == 1
    assert calls_of(lambda: histogram.observe(0.3)) == 3  # with the lambda, and a search among buckets


def calls_of(do: Callable[[], None]) -> int:
    """Calls of Python and of C, its own included."""
    events: list[str] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, arg: events.append(event))
    try:
        do()
    finally:
        sys.setprofile(before)
    return sum(event in ("call", "c_call") for event in events) - 1  # the last is setprofile's
