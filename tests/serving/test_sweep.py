"""`deepinfer sweep` against a real server: points, what a second run adds, a server that is gone, and interruptions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
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
    bench += " --header X-Tenant={} 'Authorization={}'"
    words = ["sweep", f"{server.url}/", *GRID, "--out", str(tmp_path), *plot, "--bench"]
    assert main.run([*words, bench.format("blue", "Bearer sk-first"), "--concurrency", "1"]) == 0
    first = (tmp_path / "points.jsonl").read_bytes()
    assert main.run([*words, bench.format("blue", "Bearer sk-renewed"), "--concurrency", "1,3"]) == 0
    assert (tmp_path / "points.jsonl").read_bytes().startswith(first)
    whole = json.loads((tmp_path / "sweep.json").read_text())
    assert [point["name"] for point in whole["points"]] == [f"in-24_out-6_rate-inf_at-once-{n}" for n in (1, 3)]
    command = whole["command"]
    assert command.startswith(f"deepinfer sweep {server.url}/ --input-len 24 ") and "--concurrency 1,3" in command
    assert whole["commit"] and whole["machine"]["vllm"] and whole["date"]
    assert not [file.name for file in tmp_path.iterdir() if b"sk-" in file.read_bytes()]
    for point in whole["points"]:
        assert (point["completed"], point["failed"], point["total_output_tokens"]) == (6, 0, 36)
        assert point["total_input_tokens"] == 6 * 24 and point["request_goodput"] == 0
        assert 0 < point["p50_ttft_ms"] <= point["p99_ttft_ms"] and 0 < point["p50_itl_ms"] <= point["p99_itl_ms"]
        assert point["output_throughput"] == pytest.approx(36 / point["duration"])
    assert (tmp_path / "sweep.png").exists() == (not plot)
    out = capsys.readouterr().out
    assert "in-24_out-6_rate-inf_at-once-3" in out and str(tmp_path / "sweep.json") in out
    assert main.run([*words, bench.format("blue", "x"), "--seed", "5"]) == 1
    assert "holds results of other settings: seed was 0 and is 5" in capsys.readouterr().err
    assert main.run([*words, bench.format("red", "x")]) == 1
    assert "holds results of other settings: bench_arguments was" in capsys.readouterr().err


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


def running(*words: str) -> list[int]:
    """Processes whose command lines have all these words."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            given = entry.read_bytes().decode(errors="replace")
        except OSError:
            continue  # it has ended
        if all(word in given for word in words):
            found.append(int(entry.parent.name))
    return found


def test_interrupted_it_keeps_what_is_done_and_leaves_nobody_behind(
    server: ServerProcess, checkpoint: Path, tmp_path: Path
) -> None:
    """By Ctrl-C, and then by the SIGTERM of a service manager, both in the middle of the second point."""
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    scratch.mkdir()
    bench = f"--ignore-eos --tokenizer {checkpoint} --tokenizer-mode deepseek_v41"
    words = ["sweep", server.url, "--input-len", "24", "--prompts", "4", "--concurrency", "1", "--no-plot"]
    words += ["--bench", bench, "--out", str(out), "--output-len"]
    for ends in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen(
            [sys.executable, "-m", "deepinfer_vllm.cli.main", *words, "4,3000"],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            deadline = time.monotonic() + 240
            while not running(str(scratch), "--output-len\0003000"):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(ends)
            said = process.communicate(timeout=60)[1]
        finally:
            process.kill()
        assert process.returncode == 130
        assert said == f"deepinfer: sweep: interrupted; points are in {out}, and the same command continues\n"
        assert running(str(scratch)) == [] and list(scratch.glob("deepinfer-sweep-*")) == []
        assert len((out / "points.jsonl").read_bytes().splitlines()) == 2
    kept = (out / "points.jsonl").read_bytes()
    assert main.run([*words, "4"]) == 0
    (point,) = json.loads((out / "sweep.json").read_text())["points"]
    assert point["completed"] == 4 and (out / "points.jsonl").read_bytes() == kept
