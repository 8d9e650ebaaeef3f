"""What `benchmarks/dspark_budget.py` derives from published figures, and what it calls met."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

from budgets.curves import POSITIONS, Curve, Reading, captured, fitted, stated, verified_tokens  # noqa: E402
from budgets.replay import Scene, replay  # noqa: E402
from budgets.report import Target, gain, targets  # noqa: E402
from budgets.texts import MadeUp, overconfident  # noqa: E402

from deepinfer_vllm.spec_decode.budget import allot  # noqa: E402


@pytest.mark.parametrize("reading", ["drafts", "tokens"])
def test_the_curve_implies_what_was_stated(reading: Reading) -> None:
    found = stated(*fitted(reading), reading)
    assert found == pytest.approx({16: -0.015, 60: 0.055, 96: 0.11}, abs=0.001)
    assert 0.04 < found[60] < 0.07


@pytest.mark.parametrize("reading", ["drafts", "tokens"])
def test_texts_are_accepted_as_was_stated(reading: Reading) -> None:
    requests, steps = 256, 320
    share = (verified_tokens(reading) - 1.0) / POSITIONS
    for budget, length in ((requests * POSITIONS, 3.29), (int(share * requests * POSITIONS), 3.20)):
        texts, tokens = MadeUp.of(requests, 2000, 1, reading), 0.0
        for step in range(steps):
            alive = np.cumprod(texts.chances(), axis=1)
            drafts = allot(alive, budget)
            if step >= 20:
                tokens += requests + float((alive * (np.arange(POSITIONS) < drafts[:, None])).sum())
            texts.advance(texts.accepted(drafts) + 1)
        assert tokens / requests / (steps - 20) == pytest.approx(length, abs=0.03)


def test_a_padded_curve_is_the_smooth_one_at_its_sizes() -> None:
    smooth, padded = Curve(500.0, 1.7), Curve(500.0, 1.7, padded=captured())
    assert padded.verify_s(np.array([57, 64, 513]), 0.0) == pytest.approx(
        smooth.verify_s(np.array([64, 64, 513]), 0.0), rel=1e-12
    )


def test_an_overconfident_head_is_wrong_by_what_the_paper_found() -> None:
    texts = MadeUp.of(256, 400, 1, "drafts")
    chances = np.concatenate([texts.chances() for _ in range(20) if texts.advance(np.full(256, 3)) is None])
    error = np.cumprod(overconfident(chances), axis=1).mean(axis=0) - np.cumprod(chances, axis=1).mean(axis=0)
    assert (error > 0.03).all() and (error < 0.12).all()


def test_replays_of_one_scene_are_alike_and_fixed_ones_are_what_they_say() -> None:
    scene = Scene(16, "early stop", steps=60)
    assert replay(scene) == replay(scene)
    fixed, none = (replay(Scene(16, rule, steps=60)) for rule in ("fixed 5", "none"))
    assert (fixed.verified, fixed.drafted) == (5.0, 1.0)
    assert (none.accepted_length, none.verified, none.drafted) == (1.0, 0.0, 0.0)
    assert none.throughput == pytest.approx(16 / float(scene.curve.verify_s(16, 0.0)))


def run(throughput: float, verified: float = 0.0, accepted: float = 1.0) -> dict[str, float]:
    return {"throughput": throughput, "verified": verified, "accepted_length": accepted}


def test_targets_are_read_off_the_replays() -> None:
    def scene(ours: float) -> dict[str, dict[str, float]]:
        both = {rule: run(ours, 3.4, 3.1) for rule in ("early stop", "delayed")}
        return {"none": run(50.0), "fixed 5": run(100.0, 5.0, 3.2), **both}

    headline = {
        f"{prefix}, 60 sequences, seed {seed}": scene(105.0)
        for prefix in ("smooth", "reading tokens")
        for seed in (1, 2)
    }
    found = {
        each.name: each
        for each in targets(headline, {"smooth, 1 sequences": scene(99.9), "smooth, 2 sequences": scene(99.7)})
    }
    assert found["early stop, 60 sequences, reading drafts: verified / fixed 5"].value == pytest.approx(0.68)
    assert found["delayed, 60 sequences, reading tokens: accepted / fixed 5"].value == pytest.approx(3.1 / 3.2)
    worst = found["early stop, smooth: the worst of its concurrencies"]
    assert worst.value == pytest.approx(-0.003) and not worst.met
    assert gain(scene(110.0), "delayed") == pytest.approx(0.1)
    assert Target("", 1.0, 1.0, True).met and Target("", 1.0, 1.0, False).met


@pytest.mark.parametrize("requests", [16, 60])
def test_ours_do_not_lose_where_every_draft_pays(requests: int) -> None:
    throughput = {
        rule: replay(Scene(requests, rule, steps=150)).throughput
        for rule in ("fixed 5", "early stop", "delayed", "ahead")
    }
    assert min(throughput["early stop"], throughput["delayed"]) >= 0.998 * throughput["fixed 5"]
    assert throughput["ahead"] >= 0.995 * throughput["fixed 5"], "it learns whom to trim before it gains"


def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/dspark_budget.py", "--quick", "--jobs", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr and " of " in done.stderr
    found = json.loads((tmp_path / "dspark-budget.json").read_text())
    assert set(found["sweep"]["padded, 60 sequences"]) == {
        "none",
        "fixed 5",
        "vLLM's rule",
        "early stop",
        "delayed",
        "ahead",
        "oracle",
    }
    assert done.returncode == (not all(target["met"] for target in found["targets"]))
    assert (tmp_path / "dspark-budget.png").read_bytes().startswith(b"\x89PNG")
    assert "| padded, 60 sequences | oracle |" in (tmp_path / "dspark-budget.md").read_text()
