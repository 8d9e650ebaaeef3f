"""`deepinfer sweep` against a real server: points, what a second run adds, and a server that is gone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer_vllm.cli import main
from deepinfer_vllm.server_process import ServerProcess, free_port

GRID = ("--input-len", "24", "--output-len", "6", "--prompts", "6", "--slo", "ttft:100000,e2el:0.001")


def test_a_sweep_goes_on_where_it_was(
    server: ServerProcess, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        import matplotlib  # noqa: F401

        plot = ()
    except ModuleNotFoundError:
        plot = ("--no-plot",)
    bench = f"--ignore-eos --tokenizer {checkpoint} --tokenizer-mode deepseek_v41"
    words = ["sweep", f"{server.url}/", *GRID, "--bench", bench, "--out", str(tmp_path), *plot]
    assert main.run([*words, "--concurrency", "1"]) == 0
    first = (tmp_path / "points.jsonl").read_bytes()
    assert main.run([*words, "--concurrency", "1,3"]) == 0
    assert (tmp_path / "points.jsonl").read_bytes().startswith(first)
    whole = json.loads((tmp_path / "sweep.json").read_text())
    assert [point["name"] for point in whole["points"]] == [f"in-24_out-6_rate-inf_at-once-{n}" for n in (1, 3)]
    for point in whole["points"]:
        assert (point["completed"], point["failed"], point["total_output_tokens"]) == (6, 0, 36)
        assert point["total_input_tokens"] == 6 * 24 and point["request_goodput"] == 0
        assert 0 < point["p50_ttft_ms"] <= point["p99_ttft_ms"] and 0 < point["p50_itl_ms"] <= point["p99_itl_ms"]
        assert point["output_throughput"] == pytest.approx(36 / point["duration"])
    assert (tmp_path / "sweep.png").exists() == (not plot)
    out = capsys.readouterr().out
    assert "in-24_out-6_rate-inf_at-once-3" in out and str(tmp_path / "sweep.json") in out
    assert main.run([*words, "--seed", "5"]) == 1
    assert "holds results of other settings: seed was 0 and is 5" in capsys.readouterr().err


def test_a_server_that_is_gone_is_a_failed_point(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = f"--model {checkpoint} --tokenizer-mode deepseek_v41"
    url = f"http://127.0.0.1:{free_port()}"
    assert main.run(["sweep", url, *GRID, "--bench", bench, "--out", str(tmp_path), "--no-plot"]) == 1
    output = capsys.readouterr()
    assert output.err.count("\n") == 1 and "1 of 1 points failed; in-24_out-6_rate-inf_at-once-all: " in output.err
    (point,) = json.loads((tmp_path / "sweep.json").read_text())["points"]
    assert point["error"] in output.err and str(tmp_path / f"{point['name']}.log") in point["error"]
    assert len((tmp_path / "points.jsonl").read_bytes().splitlines()) == 1
