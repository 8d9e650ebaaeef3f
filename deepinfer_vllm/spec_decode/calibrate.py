"""A calibration made: drafts from prompts or from records, the fit, and the file."""

import os
import tempfile
from pathlib import Path

from deepinfer_vllm.spec_decode import calibration_file
from deepinfer_vllm.spec_decode.calibration import Calibration, fit
from deepinfer_vllm.spec_decode.calibration_file import Made, checkpoint_digest
from deepinfer_vllm.spec_decode.offline import EngineChoice, engine
from deepinfer_vllm.spec_decode.prompts import read_prompts
from deepinfer_vllm.spec_decode.records import Records, read

ENVIRONMENT = {
    "DEEPINFER_VLLM_DSPARK_BUDGET": "fixed",
    "DEEPINFER_VLLM_DSPARK_CALIBRATION": "off",
    "DEEPINFER_VLLM_DSPARK_RECORD": "",
}
"""Every draft is verified, so that nothing of it stays unknown."""


class CalibrateError(ValueError):
    """What a user has to change. One line."""


def target(directory: Path, out: Path | None) -> Path:
    """The file to write. Raises CalibrateError where it cannot be, before any work, or where nothing needs it."""
    from deepinfer_vllm.models.deepseek_v41.safetensors_map import stored_tensors

    if not (directory / "config.json").is_file():
        raise CalibrateError(f"{directory} is no checkpoint: it has no config.json")
    if not any(".confidence_head." in name for name in stored_tensors(directory)):
        raise CalibrateError(f"{directory} has no confidence head (mtp.*.confidence_head), so nothing to calibrate")
    path = out or directory / calibration_file.NAME
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise CalibrateError(
            f"{path} cannot be written; name another by --out, and to engines by DEEPINFER_VLLM_DSPARK_CALIBRATION"
        )
    return path


def from_records(directory: Path, file: Path, drafts: int | None) -> tuple[Made, Records]:
    """Of the file's drafts those of this checkpoint, and of `drafts` tokens; of several kinds, the most frequent.

    Raises CalibrateError where there are none, OSError where the file cannot be read.
    """
    digest, everything = checkpoint_digest(directory), read(file)
    if not everything:
        raise CalibrateError(f"{file} holds no drafts; an engine with DEEPINFER_VLLM_DSPARK_RECORD={file} writes them")
    ours = {
        made: found
        for made, found in everything.items()
        if made.checkpoint == digest and drafts in (None, made.positions)
    }
    if not ours:
        kinds = (f"{len(r.drafted)} of {m.positions} tokens on {m.checkpoint[:12]}..." for m, r in everything.items())
        raise CalibrateError(
            f"{file} holds no such drafts of this checkpoint ({digest[:12]}...), but {', '.join(kinds)}"
        )
    return max(ours.items(), key=lambda item: len(item[1].drafted))


def from_prompts(
    directory: Path, file: Path, choice: EngineChoice, max_tokens: int, temperature: float | None
) -> tuple[Made, Records]:
    """Drafts of an engine that answers the prompts, each draft verified. Raises CalibrateError where it makes none."""
    prompts = read_prompts(file)
    with tempfile.TemporaryDirectory(prefix="deepinfer-calibrate-") as folder:
        path = Path(folder) / "records"
        ids_only = all(prompt.token_ids is not None for prompt in prompts)
        with engine(directory, choice, ENVIRONMENT, skip_tokenizer_init=ids_only) as offline:
            offline.begin("dspark_begin_record", str(path))
            offline.answers(prompts, max_tokens, temperature)
            offline.llm.collective_rpc("dspark_end_record")
        found = read(path) if path.exists() else {}
    if not found:
        raise CalibrateError("no draft was verified: answers are too short for drafts; raise --max-tokens")
    return max(found.items(), key=lambda item: len(item[1].drafted))


def fit_and_write(path: Path, made: Made, found: Records) -> Calibration:
    """Fit and write. Raises OSError, and CalibrateError where too few outcomes would replace a calibration that has
    temperatures."""
    calibration = fit(found.confidences, found.drafted, found.accepted, found.requests)
    if calibration.is_identity and "are needed" in calibration.note and _has_temperatures(path):
        raise CalibrateError(
            f"{path} is kept, as nothing better could be fitted: {calibration.note}. Give more prompts or longer "
            "answers, or delete the file"
        )
    calibration_file.write(path, calibration, made)
    return calibration


def _has_temperatures(path: Path) -> bool:
    try:
        return not calibration_file.read(path)[0].is_identity
    except calibration_file.CalibrationFileError:
        return False
