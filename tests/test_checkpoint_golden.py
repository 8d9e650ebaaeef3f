"""Reading golden directories, their limits, and single comparisons."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_vllm.checkpoint import compare, golden
from deepinfer_vllm.checkpoint.compare import Row
from deepinfer_vllm.checkpoint.limits import parse_limits
from deepinfer_vllm.checkpoint.report import worst_of_each
from deepinfer_vllm.models.deepseek_v41.errors import CheckpointError

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", ["v41-tiny-a", "v41-tiny-b", "v41-tiny-a-fp8"])
def test_read(name: str) -> None:
    vectors = golden.read(GOLDEN / name)
    assert vectors.prompt_lengths == (1, 15, 17, 64, 257, 700) and vectors.generated_tokens == 24
    assert set(vectors.values) == {"plain", "qat", "bf16"}
    plain, qat, bf16 = (vectors.values[kind] for kind in ("plain", "qat", "bf16"))
    for values in vectors.values.values():
        assert [len(p.input_ids) for p in values.prompts] == list(vectors.prompt_lengths)
        assert all(p.logits_last8 is not None and p.argmax is not None for p in values.prompts)
        assert not values.limits.unknown
    assert plain.prompts[3].hidden_states is not None and qat.prompts[2].hidden_states is not None
    assert set(plain.prompts[4].index_topk) == {2, 4, 5, 7} and not plain.prompts[5].index_topk
    assert bf16.prompts[0].forced_logits8 is not None and bf16.prompts[0].gen_ids is None
    assert ("engram.primes" in qat.constants) == (name != "v41-tiny-b")


def test_limits_are_those_of_the_file() -> None:
    vectors = golden.read(GOLDEN / "v41-tiny-a")
    plain, qat, bf16 = (vectors.values[kind].limits for kind in ("plain", "qat", "bf16"))
    assert (plain.max_abs, plain.hidden_rel, plain.argmax_margin, plain.greedy_exact) == (2e-4, 1e-5, 1e-3, True)
    assert (plain.index_topk_rows, plain.router_rows) == (0.002, 0.002)
    assert (qat.rel_rms_for(64), qat.rel_rms_for(65), qat.argmax_agreement) == (1e-2, 3e-2, 0.97)
    assert qat.argmax_from_tokens == 64 and qat.greedy_exact
    assert (bf16.rel_rms_for(1), bf16.rel_rms_for(700), bf16.argmax_agreement) == (0.12, 0.12, 0.88)
    assert not bf16.greedy_exact


def test_other_token_counts_wider_and_unknown_limits() -> None:
    stated = {"rel_rms_up_to_100_tokens": 5e-3, "rel_rms_longer": 5e-2, "argmax_agreement_min_from_32_tokens": 0.99}
    limits = parse_limits("qat", {**stated, "perplexity": 1.0})
    assert (limits.rel_rms_for(100), limits.rel_rms_for(101)) == (1e-2, 5e-2)  # the wider of file and format
    assert (limits.argmax_from_tokens, limits.argmax_agreement) == (32, 0.97)
    assert limits.unknown == ("perplexity",)
    assert parse_limits("plain", {}).max_abs is None


def broken(directory: Path, **changes: Any) -> Path:
    shutil.copytree(GOLDEN / "v41-tiny-b", directory)
    about = json.loads((directory / "golden.json").read_text()) | changes
    (directory / "golden.json").write_text(json.dumps(about))
    return directory


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "format_version 2, can read 1 only"),
        ({"prompt_lengths": [1, 15, 18]}, "p2 has 17 tokens, golden.json says 18"),
        ({"prompt_lengths": [1, 15, 17, 64, 257, 700, 9]}, "no file has p6.input_ids"),
        ({"files": {"golden_new.safetensors": {}}}, "lists golden_new.safetensors"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        golden.read(broken(tmp_path / "g", **changes))


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    directory = broken(tmp_path / "g")
    (directory / "golden_bf16.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"golden_bf16.safetensors does not exist"):
        golden.read(directory)
    file = directory / "golden.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"golden.safetensors (cannot be read|does not exist)"):
        golden.read(directory)
    (directory / "golden.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        golden.read(directory)
    (directory / "golden.json").write_text('{"format_version": 1}')
    with pytest.raises(CheckpointError, match="lacks files, generated_tokens, prompt_lengths"):
        golden.read(directory)


def test_row_is_not_ok_for_nan_and_inf() -> None:
    assert not Row("p", "x", math.nan, 1.0).ok and not Row("p", "x", math.nan, 0.5, at_least=True).ok
    assert not Row("p", "x", math.inf, 1.0).ok
    assert Row("p", "x", 1.0, 1.0).ok and Row("p", "x", 0.97, 0.97, at_least=True).ok


def test_strain_orders_rows() -> None:
    exact, half, outside = Row("p", "x", 0, 0), Row("p", "x", 1.0, 2.0), Row("p", "x", 3.0, 2.0)
    assert [row.strain for row in (exact, half, outside)] == [0.0, 0.5, 1.5]
    assert Row("p", "x", 1, 0).strain == Row("p", "x", math.nan, 1.0).strain == math.inf
    assert Row("p", "x", 0.5, 0.97, at_least=True).strain > 1 > Row("p", "x", 1.0, 0.97, at_least=True).strain


def test_worst_of_each_keeps_what_is_outside() -> None:
    rows = [Row("p0", f"hidden, layer {i}", value, 1.0) for i, value in enumerate([0.1, 2.0, 0.5, 3.0])]
    other = Row("p1", "hidden, layer 0", 0.0, 1.0)
    assert worst_of_each(rows) == [rows[1], rows[3]]
    assert worst_of_each([rows[0], rows[2], other]) == [rows[2], other]


def test_comparisons() -> None:
    want = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    assert compare.max_abs("p", "x", want + 0.25, want, 0.3).measured == 0.25
    assert not compare.max_abs("p", "x", want[:1], want, 9).ok
    assert compare.rel_rms("p", "x", want + 0.5, want, 1).measured == pytest.approx(0.5 / float(want.std()))
    assert compare.greedy("p", [1, 2, 3], torch.tensor([1, 9, 3])).measured == 1
    assert compare.greedy("p", [1, 2], torch.tensor([1, 2, 3])).measured == 1
    got, expected, margin = torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1]), torch.tensor([1.0, 1.0, 1e-4])
    assert compare.argmax_exact("p", got, expected, margin, 1e-3).ok
    assert not compare.argmax_exact("p", got, expected, margin, 1e-5).ok
    assert compare.argmax_agreement("p", got, expected, 0.6).measured == pytest.approx(2 / 3)
    assert compare.selections("p", "x", [{1}, {2, 3}], compare.padded_sets(torch.tensor([[1, -1], [3, 2]])), 0).ok
    assert compare.flagged_sets(torch.tensor([[0, 1, 1], [0, 0, 0]])) == [{1, 2}, set()]
    stages = torch.ones(3, 2, 4)
    rows = compare.hidden_states("p", stages * torch.tensor([1.0, 1.1, 1.0])[:, None, None], stages, 1e-3)
    assert [row.ok for row in rows] == [True, False, True] and "layer 0" in rows[1].what
