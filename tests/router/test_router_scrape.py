"""Reading /metrics against Prometheus' own parser, and of hostile text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from deepinfer_router.scrape import Reading, read_metrics


def page(ranks: int, model: str = "m", size: str = "None") -> bytes:
    """As vLLM 0.32 writes it, each rank with other numbers."""
    registry = CollectorRegistry()
    labels = ["model_name", "engine"]
    running = Gauge("vllm:num_requests_running", "Running.", labels, registry=registry)
    waiting = Gauge("vllm:num_requests_waiting", "Waiting.", labels, registry=registry)
    by_reason = Gauge("vllm:num_requests_waiting_by_reason", "Why.", [*labels, "reason"], registry=registry)
    usage = Gauge("vllm:kv_cache_usage_perc", "Usage.", labels, registry=registry)
    info = ["block_size", "num_gpu_blocks", "kv_cache_size_tokens", "engine"]
    config = Gauge("vllm:cache_config_info", "Cache.", info, registry=registry)
    prompt = Counter("vllm:prompt_tokens", "Prompt.", labels, registry=registry)
    made = Counter("vllm:generation_tokens", "Made.", labels, registry=registry)
    steps = Histogram("vllm:iteration_tokens_total", "Steps.", labels, registry=registry)
    gaps = Histogram("vllm:inter_token_latency_seconds", "Gaps.", labels, registry=registry)
    for rank in range(ranks):
        own = (model, str(rank))
        running.labels(*own).set(10 + rank)
        waiting.labels(*own).set(rank)
        by_reason.labels(*own, "capacity").set(1000)
        usage.labels(*own).set(0.25 * rank)
        config.labels("16", str(100 * (rank + 1)), size, str(rank)).set(1)
        prompt.labels(*own).inc(1e6)
        made.labels(*own).inc(500 + rank)
        for _ in range(3):
            steps.labels(*own).observe(7)
            gaps.labels(*own).observe(0.5)
    return generate_latest(registry)


def expected(rank: int, capacity: int) -> Reading:
    return Reading(10 + rank, rank, 0.25 * rank, capacity, 1e6 + 500 + rank + 3, 3.0, 1.5)


@pytest.mark.parametrize("model", ["m", 'a,engine="3"} 7', "a\\b\nc", "x" * 5000])
def test_as_prometheus_reads_it(model: str) -> None:
    text = page(3, model)
    families = text_string_to_metric_families(text.decode())
    plain = {(s.name, s.labels.get("engine")): s.value for f in families for s in f.samples}
    readings = read_metrics(text, 3)
    for rank, reading in enumerate(readings):
        assert reading == expected(rank, 1600 * (rank + 1))
        assert reading.running == plain["vllm:num_requests_running", str(rank)]
        assert reading.kv_share == plain["vllm:kv_cache_usage_perc", str(rank)]
    assert (readings[2].active, readings[2].kv_tokens) == (14, 2400)


def test_the_engine_knows_its_capacity_best() -> None:
    assert [reading.capacity_tokens for reading in read_metrics(page(2, size="12345"), 2)] == [12345, 12345]


def test_an_engine_of_one_rank_with_another_number() -> None:
    """Behind an external balancer each rank has an address of its own, and its own number as a label."""
    text = b'vllm:num_requests_running{engine="5",model_name="m"} 4.0\n'
    assert read_metrics(text, 1)[0].running == 4
    assert [reading.running for reading in read_metrics(text, 2)] == [None, None]


def test_nothing_is_known_of_an_empty_page() -> None:
    assert read_metrics(b"", 2) == [Reading(), Reading()]
    assert read_metrics(b"<html>", 1)[0].active is None
    assert Reading(running=1, kv_share=0.5).kv_tokens is None


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "", "x", "1" * 400, "0x10", "1e999", "\u0661"])
def test_what_is_no_amount_is_not_there(value: str) -> None:
    text = f'vllm:num_requests_running{{engine="0"}} {value}\nvllm:kv_cache_usage_perc{{engine="0"}} {value}\n'
    assert read_metrics(text.encode(), 1) == [Reading()]


def test_amounts_are_bounded() -> None:
    labels = 'engine="0",num_gpu_blocks="9e30",block_size="9e30"'
    text = 'vllm:num_requests_running{engine="0"} 1e300\nvllm:kv_cache_usage_perc{engine="0"} 7\n'
    text += f"vllm:cache_config_info{{{labels}}} 1\n"
    assert read_metrics(text.encode(), 1) == [Reading(running=1 << 40, kv_share=1.0)]


@given(st.lists(st.tuples(st.integers(0, 3000), st.binary(max_size=9)), max_size=20), st.integers(1, 4))
def test_any_text_is_read(cuts: list[tuple[int, bytes]], ranks: int) -> None:
    text = page(3)
    for at, junk in cuts:
        text = text[:at] + junk + text[at + len(junk) // 2 :]
    for reading in read_metrics(text, ranks):
        assert (reading.active or 0) >= 0 and 0 <= (reading.kv_share or 0) <= 1 and reading.steps >= 0


def test_a_page_of_one_line_again_and_again_ends() -> None:
    readings = read_metrics(b'vllm:num_requests_waiting{engine="0"} 1\n' * 100_000, 1)
    assert readings[0].waiting == 4096
