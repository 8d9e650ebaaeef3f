"""Traces are read as they are, and arrivals drawn from them as said."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from random import Random
from statistics import fmean, median

import pytest

from deepinfer_simulator.agent_sessions import FIRST_PROMPT, TURNS, agent_sessions
from deepinfer_simulator.arrivals import faster, shifting, shuffled, weighted
from deepinfer_simulator.traces import TraceError, TraceRequest, read, scaled, with_hits, write


def test_the_conversation_trace(root: Path) -> None:
    """Counts of its publication, and the shares of hits and lengths that docs/router.md quotes."""
    requests = read(root / "benchmarks" / "traces" / "mooncake_conversation_trace.jsonl.gz")
    assert len(requests) == 12_031 and requests[0].at == 0 and requests[-1].at == 3536.999
    assert requests[0].input_tokens == 6758 and len(requests[0].blocks) == 14
    tokens = sum(request.input_tokens for request in requests)
    assert sum(request.hit_tokens for request in with_hits(requests)) / tokens == pytest.approx(0.37, abs=0.005)
    lengths = [request.input_tokens for request in scaled(requests, 2.5)]
    edges = (0, 16_384, 65_536, 262_144, 1 << 40)
    shares = [sum(low <= x < high for x in lengths) / len(lengths) for low, high in zip(edges, edges[1:], strict=False)]
    assert shares == pytest.approx([0.483, 0.408, 0.104, 0.005], abs=0.001)


def test_optional_fields_come_back(tmp_path: Path) -> None:
    requests = [
        TraceRequest(0.0, 100, 3, (1, 2)),
        TraceRequest(1.5, 700, 0, (1, 3), session="a", images=2, slo_s=0.25),
    ]
    for name in ("trace.jsonl", "trace.jsonl.gz"):
        write(requests, tmp_path / name)
        assert read(tmp_path / name) == requests
    assert (tmp_path / "trace.jsonl.gz").read_bytes()[:2] == b"\x1f\x8b"


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv.gz"
    rows = [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:17:04.0319600,3180,8",
        "2023-11-16 18:17:03.9799600,4808,10",
    ]
    with gzip.open(path, "wt", newline="") as file:
        file.write("\r\n".join(rows) + "\r\n")
    first, second = read(path)
    assert (first.at, first.input_tokens, first.output_tokens) == (0.0, 4808, 10)
    assert second.at == pytest.approx(0.052) and second.input_tokens == 3180


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "trace: no request"),
        ('{"timestamp": 1}\n', "trace line 1: KeyError 'input_length'"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}\n', "trace line 1: ValueError 0 tokens"),
        ('\n{"timestamp": 1, "input_length": 1.5, "output_length": 1}\n', "trace line 2: ValueError 1.5 tokens"),
        ("[1]\n", "trace line 1: TypeError"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}\n', "trace line 1: ValueError nan milliseconds"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [[1]]}\n', "ValueError hash_ids [[1]]"),
        ("nonsense\n", "trace line 1: JSONDecodeError"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "trace line 2: ValueError Invalid isoformat"),
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:17:03,1\n", "trace line 2: KeyError 'GeneratedTokens'"),
    ],
)
def test_what_is_no_trace_is_said_in_one_line(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "trace"
    path.write_text(content)
    with pytest.raises(TraceError) as error:
        read(path)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"\x1f\x8b\x08\x00broken"])
def test_what_is_no_text(tmp_path: Path, content: bytes) -> None:
    for name in ("trace", "trace.gz"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TraceError, match="name a trace in JSON Lines or CSV"):
            read(tmp_path / name)
    with pytest.raises(TraceError, match="No such file"):
        read(tmp_path / "none")


def test_hits_are_the_longest_known_prefix() -> None:
    requests = [
        TraceRequest(0, 1100, 1, (1, 2, 3)),
        TraceRequest(1, 1600, 1, (1, 2, 4, 3)),
        TraceRequest(2, 600, 1, (1, 2)),
    ]
    assert [request.hit_tokens for request in with_hits(requests)] == [0, 1024, 599]


def test_scaled_lengths_keep_something_to_compute() -> None:
    requests = [TraceRequest(0, 3, 1, hit_tokens=2), TraceRequest(1, 1, 1)]
    assert [(r.input_tokens, r.hit_tokens) for r in scaled(requests, 2.5)] == [(8, 5), (2, 0)]
    assert [(r.input_tokens, r.hit_tokens) for r in scaled(requests, 0.3)] == [(1, 0), (1, 0)]
    with pytest.raises(ValueError, match="lengths times 0"):
        scaled(requests, 0)


def test_faster() -> None:
    assert [request.at for request in faster([TraceRequest(3.0, 1, 1)], 2)] == [1.5]
    with pytest.raises(ValueError, match="the rate times -1"):
        faster([], -1)


def test_poisson_arrivals() -> None:
    """As many as the rate says, exponential gaps (mean and deviation alike), lengths as in the trace."""
    trace = [TraceRequest(0, length, 1) for length in (10, 20, 30)]
    found = list(shuffled(trace, 50.0, 200.0, Random(3)))
    gaps = [after.at - before.at for before, after in zip(found, found[1:], strict=False)]
    assert len(found) == pytest.approx(10_000, rel=0.03) and min(gaps) >= 0 and found[-1].at < 200
    assert fmean(gap * gap for gap in gaps) == pytest.approx(2 * fmean(gaps) ** 2, rel=0.05)
    assert sorted(request.input_tokens for request in found[:30]) == sorted([10, 20, 30] * 10)
    assert found == list(shuffled(trace, 50.0, 200.0, Random(3)))


def test_shifting_traffic() -> None:
    """In every second period, long prompts have four times their share's odds."""
    trace = [TraceRequest(0, length, 1) for length in (10, 10, 10, 100)]
    found = list(weighted(trace, 100.0, 400.0, Random(5), shifting(50, 4.0, 100.0), 100.0))
    share = [fmean(r.input_tokens == 100 for r in found if r.at // 100 == period) for period in range(4)]
    assert share == pytest.approx([1 / 4, 4 / 7, 1 / 4, 4 / 7], abs=0.02)


def test_agent_sessions() -> None:
    requests = agent_sessions(60, 600.0, Random(1))
    by_session: dict[str, list[TraceRequest]] = {}
    for request in requests:
        by_session.setdefault(request.session, []).append(request)
    assert len(by_session) == 60 and [r.at for r in requests] == sorted(r.at for r in requests)
    assert fmean(len(turns) for turns in by_session.values()) == pytest.approx(TURNS, rel=0.2)
    shared = requests[0].blocks[:8]
    for turns in by_session.values():
        assert FIRST_PROMPT[0] <= turns[0].input_tokens <= FIRST_PROMPT[1]
        for before, after in zip(turns, turns[1:], strict=False):
            assert after.at > before.at
            assert after.input_tokens >= before.input_tokens + before.output_tokens
            assert after.blocks[: len(before.blocks)] == before.blocks
        assert turns[0].blocks[:8] == shared
    last = sorted(turns[-1].input_tokens for turns in by_session.values())
    assert 60_000 < median(last) < 110_000
    ids = [block for turns in by_session.values() for block in turns[-1].blocks[8:]]
    assert len(ids) == len(set(ids))
    assert json.dumps([r.input_tokens for r in requests]) == json.dumps(
        [r.input_tokens for r in agent_sessions(60, 600.0, Random(1))]
    )
