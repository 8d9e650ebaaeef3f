"""The grid, the objectives, the table and the picture of a sweep, and what `deepinfer sweep` refuses."""

from __future__ import annotations

import builtins
import json
from math import inf
from pathlib import Path
from typing import Any

import pytest

from deepinfer_vllm.cli import main
from deepinfer_vllm.cli.sweep import table
from deepinfer_vllm.evaluation.errors import EvaluationError
from deepinfer_vllm.evaluation.json_file import write_json
from deepinfer_vllm.evaluation.sweep_bench import command, run_point
from deepinfer_vllm.evaluation.sweep_grid import Point, grid, objectives
from deepinfer_vllm.evaluation.sweep_plot import plot


def test_the_grid_has_every_combination_once_lighter_loads_first() -> None:
    points = grid("inf, 2,0.5,2", "8,1", "512", "16,64")
    assert len(points) == 3 * 2 * 2 and len({point.name for point in points}) == len(points)
    assert [(p.rate, p.concurrency) for p in points[:6]] == [(0.5, 1), (0.5, 8), (2, 1), (2, 8), (inf, 1), (inf, 8)]
    assert [p.output_tokens for p in points] == [16] * 6 + [64] * 6
    assert grid("", "", "", "") == [Point(inf, None, None, None)]
    assert Point(0.5, 8, 512, 16).name == "in-512_out-16_rate-0.5_at-once-8"
    assert Point(inf, None, None, None).name == "in-any_out-any_rate-inf_at-once-all"


def test_what_vllm_is_told() -> None:
    words = command("http://x", Point(2.0, 8, 512, None), {"ttft": 2000.0, "tpot": 50.0}, 7, 3, ["--ignore-eos"])
    text = " ".join(words[1:])
    assert text.startswith("bench serve --base-url http://x --num-prompts 7 --seed 3 ")
    assert text.endswith(
        "--request-rate 2 --max-concurrency 8 --input-len 512 --goodput ttft:2000 tpot:50 --ignore-eos"
    )
    assert "--goodput" not in command("http://x", Point(inf, None, None, None), {}, 7, 3, [])


def test_objectives_are_milliseconds() -> None:
    assert objectives("ttft:2000, tpot:50.5") == {"ttft": 2000, "tpot": 50.5} and objectives("") == {}
    for bad in ("itl:5", "ttft", "ttft:", "ttft:-1", "ttft:nan", "ttft:inf", "ttft=5"):
        with pytest.raises(EvaluationError, match="METRIC:MILLISECONDS of ttft, tpot, e2el"):
            objectives(bad)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], 'give either the URL of a server, or --serve "MODEL ..."'),
        (["http://x", "--serve", "m"], "give either the URL"),
        (["http://x", "--rates", "1;2"], "--rates '1;2' is no number; give some with commas between"),
        (["http://x", "--rates", "0"], "--rates 0: above 0 is needed"),
        (["http://x", "--rates", "nan"], "--rates nan: above 0"),
        (["http://x", "--concurrency", "1.5"], "--concurrency '1.5' is no number"),
        (["http://x", "--input-len", "-3"], "--input-len -3: above 0"),
        (["http://x", "--slo", "p99:3"], "--slo 'p99:3': METRIC:MILLISECONDS"),
        (["http://x", "--bench", "--label '"], '--bench "--label \'": No closing quotation'),
        (["--serve", ""], "--serve '': a model comes first"),
        (["--serve", "m --port 80"], "--host and --port are chosen here"),
        (["http://x", "--out", "/dev/null"], "name another place by --out"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.run(["sweep", "--no-plot", *arguments]) == 1
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert output.err.startswith("deepinfer: sweep: ") and says in output.err


def test_without_matplotlib_it_says_so_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def absent(name: str, *more: Any) -> Any:
        if name == "matplotlib":
            raise ModuleNotFoundError(name=name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", absent)
    assert main.run(["sweep", "http://x", "--out", str(tmp_path / "out")]) == 1
    remedy = 'the picture needs matplotlib: pip install "deepinfer-vllm[plot]", or go without by --no-plot'
    assert capsys.readouterr().err == f"deepinfer: sweep: {remedy}\n"
    assert not (tmp_path / "out").exists()


def measured(tmp: Path) -> dict[str, Any]:
    """A sweep.json as two curves of three loads make it, one point of which failed."""
    points = []
    for point in grid("1,4,inf", "16", "512,4096", "64"):
        rate = min(point.rate, 6.0)
        latency = {f"p{p}_{m}_ms": rate * p for p in (50, 99) for m in ("ttft", "itl")}
        points.append(
            {
                "name": point.name,
                "curve": point.curve,
                "rate": None if point.rate == inf else point.rate,
                "concurrency": 16,
                "request_throughput": rate,
                "request_goodput": rate / 2,
                "output_throughput": rate * 64,
                **latency,
            }
        )
    points[-1] = {"name": "x", "curve": points[-1]["curve"], "rate": None, "concurrency": 16, "error": "gone"}
    return {"settings": {"slo_ms": {"ttft": 300.0, "tpot": 100.0}}, "points": points}


def test_the_table_has_a_row_a_point(tmp_path: Path) -> None:
    head, *rows = table(measured(tmp_path)["points"])
    assert head.split()[:4] == ["point", "req/s", "goodput", "tok/s"]
    assert rows[0].split() == [
        "in-512_out-64_rate-1_at-once-16",
        *["1.00", "0.50", "64.00", "50.00", "99.00", "50.00", "99.00"],
    ]
    assert rows[-1].split() == ["x", "failed"]


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    whole = json.loads(json.dumps(measured(tmp_path)))
    plot(whole, tmp_path / "a.png")
    plot(whole, tmp_path / "b.png")
    content = (tmp_path / "a.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n") and len(content) > 20_000
    assert content == (tmp_path / "b.png").read_bytes()
    plot({**whole, "settings": {"slo_ms": {}}}, tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes() != content
    with pytest.raises(EvaluationError, match="no point has a result"):
        plot({**whole, "points": whole["points"][-1:]}, tmp_path / "d.png")
    with pytest.raises(EvaluationError, match=r"absent/e.png: No such file"):
        plot(whole, tmp_path / "absent" / "e.png")


def test_what_the_disk_refuses_is_one_line(tmp_path: Path) -> None:
    """A directory where a point's log or the results should go; nothing is left beside it."""
    (tmp_path / "log").mkdir()
    with pytest.raises(EvaluationError, match="log: Is a directory; the same command continues"):
        run_point(["true"], tmp_path / "log")
    with pytest.raises(EvaluationError, match="log: Is a directory; the same command continues"):
        write_json(tmp_path / "log", {})
    assert [file.name for file in tmp_path.iterdir()] == ["log"]
