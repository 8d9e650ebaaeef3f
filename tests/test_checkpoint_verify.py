"""`deepinfer checkpoint verify`: the reference passes, broken ones do not, bad input is one line."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from deepinfer_vllm.checkpoint.verify import Factory, Generation, Prefill, run
from deepinfer_vllm.cli.checkpoint import app
from deepinfer_vllm.models.deepseek_v41.errors import CheckpointError
from reference import Output, Reference, load

GOLDEN = Path(__file__).parent / "golden"
Break = Callable[[Output], Output]


class ReferenceBackend:
    """The reference as a backend; `spoil` may change what it computed."""

    name = "reference"

    def __init__(self, reference: Reference, dtype: str, numerics: str, spoil: Break) -> None:
        self.reference, self.dtype, self.qat, self.spoil = reference, getattr(torch, dtype), numerics == "qat", spoil
        self.closed = False

    def prefill(self, prompt_ids: Sequence[int]) -> Prefill:
        out = self._forward(prompt_ids)
        return Prefill(
            logits=out.logits.float(),
            hidden_states=out.hidden_states,
            router_ids=out.router_ids,
            engram_hash_ids=out.engram_hash_ids,
            candidate_blocks=out.candidate_blocks,
            index_topk=out.index_topk,
        )

    def generate(self, prompt_ids: Sequence[int], count: int) -> Generation:
        ids, logits = list(prompt_ids), []
        for _ in range(count):
            logits.append(self._forward(ids).logits[-1].float())
            ids.append(int(logits[-1].argmax()))
        return Generation(ids[-count:], torch.stack(logits))

    def close(self) -> None:
        self.closed = True

    def _forward(self, ids: Sequence[int]) -> Output:
        dtype = torch.float64 if self.dtype == torch.float32 else self.dtype
        return self.spoil(computed(self.reference, tuple(ids), self.qat, dtype))


@functools.cache
def computed(reference: Reference, ids: tuple[int, ...], qat: bool, dtype: torch.dtype) -> Output:
    return reference.forward(ids, qat=qat, dtype=dtype)


def factories(reference: Reference, spoil: Break = lambda out: out) -> dict[str, Factory]:
    return {"bare": lambda directory, dtype, numerics: ReferenceBackend(reference, dtype, numerics, spoil)}


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """v41-tiny-a with its first four prompts, which is also another number of prompts than elsewhere."""
    directory = tmp_path_factory.mktemp("golden") / "short"
    shutil.copytree(GOLDEN / "v41-tiny-a", directory)
    about = json.loads((directory / "golden.json").read_text())
    about["prompt_lengths"] = about["prompt_lengths"][:4]
    (directory / "golden.json").write_text(json.dumps(about))
    return directory


@pytest.fixture(scope="module")
def reference(short: Path) -> Reference:
    return load(short)


@pytest.mark.parametrize("numerics", ["plain", "qat", "all"])
def test_the_reference_is_within_all_limits(
    short: Path, reference: Reference, numerics: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(short, backend="bare", numerics=numerics, factories=factories(reference)) == 0
    printed = capsys.readouterr().out
    assert "0 outside their limits" in printed and "OUTSIDE" not in printed
    assert ("compressed rows" in printed) == (numerics != "qat")


def test_bfloat16_is_within_its_limits(short: Path, reference: Reference) -> None:
    assert run(short, backend="bare", numerics="qat", dtype="bfloat16", factories=factories(reference)) == 0


def replaced(**changes: Callable[[Output], object]) -> Break:
    return lambda out: dataclasses.replace(out, **{name: change(out) for name, change in changes.items()})


BROKEN: dict[str, Break] = {
    "logits": replaced(logits=lambda out: out.logits + 5e-4 * (torch.arange(out.logits.shape[1]) % 2)),
    "greedy": replaced(logits=lambda out: out.logits.roll(1, dims=1)),
    "not a number": replaced(logits=lambda out: out.logits * torch.nan),
    "hidden": replaced(hidden_states=lambda out: out.hidden_states * (1 + 1e-4)),
    "experts": replaced(router_ids=lambda out: (out.router_ids + 1) % 8),
    "compressed rows": replaced(index_topk=lambda out: {k: [s - {0} for s in v] for k, v in out.index_topk.items()}),
    "candidate blocks": replaced(candidate_blocks=lambda out: [s - {0} for s in out.candidate_blocks or []]),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_one_is_found(
    what: str, short: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(short, backend="bare", factories=factories(reference, BROKEN[what])) == 1
    outside = [line for line in capsys.readouterr().out.splitlines() if "OUTSIDE" in line]
    assert outside
    if what not in ("greedy", "not a number"):
        assert any(what in line for line in outside)


def test_broken_engram_rows_are_found_in_qat(short: Path, reference: Reference) -> None:
    spoil = replaced(engram_hash_ids=lambda out: None if out.engram_hash_ids is None else out.engram_hash_ids + 1)
    assert run(short, backend="bare", numerics="qat", factories=factories(reference, spoil)) == 1


def test_a_backend_is_closed_also_when_it_fails(short: Path, reference: Reference) -> None:
    def fail(out: Output) -> Output:
        raise RuntimeError("broken on purpose")

    made = ReferenceBackend(reference, "float32", "plain", fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        run(short, backend="bare", factories={"bare": lambda *_: made})
    assert made.closed


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"backend": "tpu"}, "unknown backend 'tpu': choose from bare, engine, both"),
        ({"numerics": "fp4"}, "unknown numerics 'fp4'"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
    ],
)
def test_unknown_choices_are_refused(choice: dict[str, str], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        run(GOLDEN / "v41-tiny-a", **choice)


def test_a_directory_without_golden_values_is_one_line_and_code_2(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert result.exit_code == 2 and "golden.json does not exist" in result.stderr
    assert len(result.stderr.splitlines()) == 1
