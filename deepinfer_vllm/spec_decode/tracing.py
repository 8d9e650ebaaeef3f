"""A trace made: answers of an engine to prompts, and then the states of each whole text."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_vllm.spec_decode import trace_files
from deepinfer_vllm.spec_decode.calibration_file import checkpoint_digest
from deepinfer_vllm.spec_decode.offline import EngineChoice, OfflineEngine, engine
from deepinfer_vllm.spec_decode.prompts import Prompt, PromptsError, read_prompts

ENVIRONMENT = {"DEEPINFER_VLLM_DECODER_REPLAY": "0", "DEEPINFER_VLLM_DSPARK_BUDGET": "fixed"}
"""Replay leaves out rows of long prompts, whose states a trainer wants."""
SPARE_BYTES = 1 << 30


@dataclass(frozen=True)
class Done:
    """What is in a trace, and what was to be."""

    texts: int
    wanted: int
    tokens: int
    written_bytes: int
    why: str
    """Why texts are missing, if some are."""


def run(
    directory: Path,
    prompts_file: Path,
    out: Path,
    choice: EngineChoice,
    max_tokens: int,
    temperature: float | None,
    limit_bytes: int,
    say: Callable[[str], None],
) -> Done:
    """Write the trace. Raises TraceError, PromptsError, EngineError or OSError for what the user can act on."""
    prompts = read_prompts(prompts_file)
    _must_be_text(prompts_file, prompts)
    with _folder(out):
        digest = checkpoint_digest(directory)
        ids_only = all(prompt.token_ids is not None for prompt in prompts)
        more = {"skip_tokenizer_init": ids_only, "enable_prefix_caching": False}
        with engine(directory, choice, ENVIRONMENT, **more) as offline:
            answered = offline.answers(prompts, max_tokens, temperature)
            layers, hidden_size, token_bytes = _shape(offline.config)
            expected = token_bytes * sum(len(prompt) + len(answer) for prompt, answer in answered)
            say(_estimate(expected, limit_bytes, token_bytes))
            _must_fit(out, min(expected, limit_bytes))
            first = offline.llm.request_counter.counter
            full = _trace(offline, out, answered, limit_bytes)
    texts = _texts(out, answered, first)
    trace_files.write_manifest(out, digest, layers, hidden_size, texts)
    return Done(
        len(texts),
        len(answered),
        sum(text["tokens"] for text in texts),
        sum((out / text["file"]).stat().st_size for text in texts),
        "the limit (--max-gb) or the disk ended it" if full else "the engine computed no states for them",
    )


@contextmanager
def _folder(out: Path) -> Iterator[None]:
    """A new or empty one; if it is new and nothing comes into it, it goes again. Raises TraceError, OSError."""
    new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise trace_files.TraceError(f"{out} is not empty; name a new folder, so that no two traces mix")
    try:
        yield
    finally:
        if new and not any(out.iterdir()):
            out.rmdir()


def _trace(offline: OfflineEngine, out: Path, answered: list[tuple[list[int], list[int]]], limit_bytes: int) -> bool:
    """Whether the trace ended early. Each text is a prompt of which one token more is asked."""
    offline.begin("dspark_begin_trace", str(out), limit_bytes)
    limit = offline.config.model_config.max_model_len
    whole = [Prompt(token_ids=(prompt + answer)[: limit - 1]) for prompt, answer in answered]
    offline.answers(whole, max_tokens=1, temperature=0.0)
    return any(offline.llm.collective_rpc("dspark_end_trace"))


def _texts(out: Path, answered: list[tuple[list[int], list[int]]], first: int) -> list[dict[str, Any]]:
    """For the manifest, in the order of prompts. Requests are numbered as asked, from `first`."""
    found = {int(name.partition("-")[0]) - first: text for name, text in trace_files.requests(out).items()}
    return [
        {"file": file, "prompt": prompt, "tokens": tokens, "answer_from": len(answered[prompt][0])}
        for prompt, (file, tokens) in sorted(found.items())
    ]


def _must_be_text(file: Path, prompts: list[Prompt]) -> None:
    """Texts are computed again from their tokens, which do not hold images."""
    for number, prompt in enumerate(prompts, 1):
        for message in prompt.messages or ():
            parts = message.get("content")
            if isinstance(parts, list) and any(not isinstance(p, dict) or p.get("type") != "text" for p in parts):
                raise PromptsError(f"{file}, prompt {number}: a trace is of texts alone; leave images and sounds out")


def _shape(config: Any) -> tuple[list[int], int, int]:
    """Target layers, width, and bytes of a token in a trace."""
    from deepinfer_vllm.models.deepseek_v41.dspark_config import DraftConfig

    draft = DraftConfig.from_hf(config.speculative_config.draft_model_config.hf_config)
    layers, hidden_size, element_bytes = (
        draft.target_layers,
        draft.model.hidden_size,
        config.model_config.dtype.itemsize,
    )
    return list(layers), hidden_size, trace_files.bytes_per_token(len(layers), hidden_size, element_bytes)


def _estimate(expected_bytes: int, limit_bytes: int, token_bytes: int) -> str:
    left_out = f"; texts beyond {limit_bytes / 1e9:g} GB are left out" if expected_bytes > limit_bytes else ""
    return f"The texts take {expected_bytes / 1e9:.3g} GB, {token_bytes:,} bytes a token{left_out}."


def _must_fit(out: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(out).free
    if free < needed_bytes + SPARE_BYTES:
        there, needed = f"{free / 1e9:.3g} GB free", f"{needed_bytes / 1e9:.3g}"
        raise trace_files.TraceError(f"{out} has {there}, the trace needs {needed} and 1 to spare; lower --max-gb")
