"""`deepinfer simulate` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from deepinfer_simulator.traces import TraceRequest, write
from deepinfer_vllm.cli.main import run

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl.gz"
    write([TraceRequest(0.1 * n, 3000 * (1 + n % 40), 20 + n % 60, (n,)) for n in range(200)], path)
    return str(path)


def test_decode(trace: str, tmp_path: Path, capsys: Capture) -> None:
    options = ["--trace", trace, "--ranks", "8", "--per-rank", "10", "--steps", "90", "--replicas", "2"]
    assert run(["simulate", "decode", *options, "--plot", str(tmp_path / "plot.svg")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["policy", "router", "least-requests", "round-robin"]
    balances = [float(line.split()[1]) for line in lines[1:]]
    assert balances[0] == max(balances) and all(0.4 < balance <= 1 for balance in balances)
    texts = [node.text for node in ElementTree.parse(tmp_path / "plot.svg").iter() if node.tag.endswith("text")]
    assert texts[0] == "decode balance, 8 ranks, 2 routers" and "least-requests" in texts
    assert run(["simulate", "decode", *options, "--json", "--policy", "router", "--seeds", "3"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["policy"] == "router" and len(row["runs"]) == 3 and row["runs"][0]["steps"] == 60
    assert len({found["eta"] for found in row["runs"]}) == 3


def test_prefill(trace: str, tmp_path: Path, capsys: Capture) -> None:
    """Sections of the router's own file count."""
    options = ["--trace", trace, "--engines", "4", "--ranks", "2", "--seconds", "60", "--seeds", "1", "--load", "0.5"]
    policies = [part for name in ("router", "context-length-aware", "cache-aware") for part in ("--policy", name)]
    assert run(["simulate", "prefill", *options, *policies]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["router", "context-length-aware", "cache-aware"]
    assert {line.split()[5] for line in lines[1:]} == {"-"}  # no prompt of the trace is so long
    config = tmp_path / "router.yaml"
    config.write_text("prefill: {pools: false}\nlisten: 127.0.0.1:1\n")
    found = []
    for extra in (["--config", str(config)], []):
        assert run(["simulate", "prefill", *options, "--json", "--policy", "router", *extra]) == 0
        found.append(json.loads(capsys.readouterr().out)[0]["runs"])
    assert found[0] != found[1] and found[0][0]["moves_per_minute"] == 0


def test_made_up_sessions_of_agents(capsys: Capture) -> None:
    assert run(["simulate", "decode", "--ranks", "2", "--steps", "30", "--seeds", "1", "--policy", "router"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("router")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["decode", "--policy", "x"], "simulate: --policy 'x': one of router, random,"),
        (["decode", "--poll", "0"], "simulate: --poll 0: the router polls; give it a time above 0"),
        (["decode", "--trace", "/none"], "simulate: /none: [Errno 2]"),
        (["decode", "--steps", "3"], "--steps"),
        (["prefill", "--chunks", "x"], "simulate: --chunks 'x': one of fixed, budget, whole"),
        (["prefill", "--config", "/none"], "simulate: /none: No such file"),
        (["prefill", "--seconds", "10", "--load", "0.01", "--ranks", "1", "--engines", "1"], "simulate for longer"),
    ],
)
def test_what_cannot_work_is_one_line(arguments: list[str], said: str, capsys: Capture) -> None:
    assert run(["simulate", *arguments]) != 0
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error and len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("decode: {choices: 1}", "router.yaml: decode: choices: 1: should be greater than or equal to 2"),
        ("- decode", "router.yaml: not the router's configuration"),
        ("decode: {", "not YAML"),
    ],
)
def test_a_wrong_section_is_named(content: str, said: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(content)
    assert run(["simulate", "decode", "--config", str(path)]) == 1
    assert said in capsys.readouterr().err


def test_a_plot_that_cannot_be_written(trace: str, tmp_path: Path, capsys: Capture) -> None:
    options = ["--trace", trace, "--ranks", "2", "--steps", "30", "--seeds", "1", "--policy", "random"]
    assert run(["simulate", "decode", *options, "--plot", str(tmp_path / "none" / "x.svg")]) == 1
    assert "No such file" in capsys.readouterr().err
