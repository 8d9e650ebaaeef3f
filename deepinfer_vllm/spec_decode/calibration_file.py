"""A calibration as JSON beside its checkpoint, and the engine's way of taking none rather than a wrong one.

A file names what its temperatures are of: the checkpoint, by digest; how many tokens a draft has, as a draft layer's
attention sees its whole block, so that a block of another length has other confidences; and how drafts are drawn, which
decides what is accepted. Where one of these differs, or the file cannot be read, confidences are used as they are, with
one warning. dtype and numerics are noted: they move confidences little, so that another one is a remark.
"""

import json
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_kvstore.whole_file import replacing
from deepinfer_vllm.kv_connector.weights_digest import directory_digest
from deepinfer_vllm.spec_decode.calibration import Calibration

NAME = "dspark_calibration.json"
SCHEMA = "deepinfer.dspark-calibration/1"
MAX_BYTES = 1 << 20
EFFECT = "the draft's confidences are used as the checkpoint gives them"


class CalibrationFileError(ValueError):
    """A file that is not there, cannot be read, or belongs to something else."""


@dataclass(frozen=True)
class Made:
    """What temperatures are of."""

    checkpoint: str
    """`checkpoint_digest` of its directory."""
    positions: int
    """Tokens of a draft: num_speculative_tokens."""
    dtype: str = ""
    numerics: str = ""
    draft_sample_method: str = ""
    """"greedy" or "probabilistic": what is drawn decides how often it stands."""

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Made":
        """The fields of that name. Raises KeyError or ValueError where one is missing or no text or number."""
        return cls(*(_typed(value, name, kind) for name, kind in cls.__annotations__.items()))


def checkpoint_digest(directory: Path) -> str:
    """Of the config, of every weight file, and of each tensor of the draft (mtp.*) but experts'; milliseconds.

    A checkpoint whose draft alone was trained on has another digest, heads alone included, as has one whose target
    was. Raises OSError.
    """
    return directory_digest(directory, always=lambda name: name.startswith("mtp.") and ".experts." not in name)


def write(path: Path, calibration: Calibration, made: Made) -> None:
    """Write the file, whole or not at all. Raises OSError."""
    value = {"schema": SCHEMA, **made.__dict__, **calibration.__dict__}
    with replacing(path) as draft:
        draft.write_text(json.dumps(value, indent=1) + "\n")


def read(path: Path) -> tuple[Calibration, Made]:
    """What `write` wrote. Raises CalibrationFileError, of one line, for anything else."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CalibrationFileError(f"{path} is no regular file")  # a pipe would hold up the engine's start
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise CalibrationFileError(f"{path}: {error.strerror}") from None
    try:
        if len(text) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        return _parsed(json.loads(text))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise CalibrationFileError(f"{path} is no calibration: {reason}") from None


def load(path: Path, made: Made, warn: Callable[[str], None]) -> Calibration:
    """The file's calibration for an engine of `made`, or none where it is another's or unreadable.

    Never raises; says at most one line, with the effect. Of texts, those that are empty on a side are not compared.
    """
    try:
        calibration, of = read(path)
        _must_be(path, of, made)
    except CalibrationFileError as error:
        warn(f"{error}; {EFFECT}. Run `deepinfer calibrate-dspark` for this checkpoint and block size.")
        return Calibration.identity(made.positions)
    for name in ("dtype", "numerics"):
        there, here = getattr(of, name), getattr(made, name)
        if there and here and there != here:
            warn(f"{path} was fitted with {name} {there}, this engine runs {here}: it is used, as they differ little.")
            break
    return calibration


def _must_be(path: Path, of: Made, made: Made) -> None:
    if of.checkpoint != made.checkpoint:
        raise CalibrationFileError(
            f"{path} is of another checkpoint (digest {of.checkpoint[:12]}..., this one has {made.checkpoint[:12]}...)"
        )
    if of.draft_sample_method and made.draft_sample_method and of.draft_sample_method != made.draft_sample_method:
        raise CalibrationFileError(
            f"{path} is of {of.draft_sample_method} drafts, this engine makes {made.draft_sample_method} ones"
            " (draft_sample_method)"
        )
    if of.positions != made.positions:
        raise CalibrationFileError(
            f"{path} is of drafts of {of.positions} tokens, this engine drafts {made.positions}"
            " (num_speculative_tokens)"
        )


def _parsed(value: Any) -> tuple[Calibration, Made]:
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise ValueError(f"its schema is not {SCHEMA!r}")
    made = Made.from_json(value)
    calibration = Calibration(
        _numbers(value, "temperatures"),
        _numbers(value, "ece_before"),
        _numbers(value, "ece_after"),
        outcomes=tuple(int(n) for n in _numbers(value, "outcomes")),
        note=_typed(value, "note", str),
    )
    if len(calibration.temperatures) != made.positions:
        raise ValueError(f"{len(calibration.temperatures)} temperatures for {made.positions} positions")
    return calibration, made


def _typed(value: dict[str, Any], name: str, kind: Any) -> Any:
    if type(value[name]) is not kind:
        raise ValueError(f"{name} = {value[name]!r} is no {kind.__name__}")
    return value[name]


def _numbers(value: dict[str, Any], name: str) -> tuple[float, ...]:
    numbers = _typed(value, name, list)
    if not all(type(n) in (int, float) for n in numbers):
        raise ValueError(f"{name} = {numbers} are not all numbers")
    return tuple(float(n) for n in numbers)
