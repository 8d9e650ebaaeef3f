"""How a model is asked, and what of it a file of results must agree on."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from deepinfer_vllm import __version__, envs
from deepinfer_vllm.evaluation.errors import EvaluationError
from deepinfer_vllm.evaluation.task import Task, encodable
from deepinfer_vllm.hidden_secrets import hidden

Choices = Literal["letter", "loglikelihood"]
OWN_SAMPLING = {
    *("n", "seed", "max_tokens", "temperature", "logprobs", "prompt_logprobs", "detokenize"),
    *("output_kind", "skip_special_tokens"),
}
"""Sampling parameters that have a flag, or that reading the answer needs as they are."""


@dataclass(frozen=True)
class Settings:
    """What a user chooses."""

    samples: int = 1
    temperature: float | None = None
    """None: 0 for one sample, and for more what the checkpoint's generation_config.json says."""
    max_tokens: int = 2048
    seed: int = 0
    thinking: str = "auto"
    choices: Choices = "letter"
    strict: bool = False
    system: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises EvaluationError."""
        if self.samples > 1 and self.temperature == 0:
            raise EvaluationError(f"--samples {self.samples} at --temperature 0: all would be equal; raise one")
        if self.samples > 1 and self.choices == "loglikelihood":
            raise EvaluationError(f"--samples {self.samples}: log-likelihoods are not sampled; leave it 1")
        if self.choices == "loglikelihood" and self.thinking not in ("auto", "off"):
            raise EvaluationError(
                f"--thinking {self.thinking}: an option's log-likelihood is that without; leave it off"
            )
        template_arguments(self.thinking)
        if not encodable(self.system):
            raise EvaluationError(f"--system {self.system!r} is not UTF-8")
        sampling_params(self.sampling)

    def greedy_unless_sampled(self) -> float | None:
        """The temperature, or None for the checkpoint's."""
        return 0.0 if self.temperature is None and self.samples == 1 else self.temperature

    def recorded(self, task: Task, model: str) -> dict[str, Any]:
        """What answers depend on, for the first line of the results, without secrets.

        Raises OSError for a model that cannot be read.
        """
        from deepinfer_vllm.kv_connector.weights_digest import directory_digest

        own = {name: value for name, value in dataclasses.asdict(self).items() if name != "strict"}
        own["engine"].pop("hf_token", None)  # no answer depends on it
        recorded = {
            "task": task.name,
            "task_sha256": task.digest,
            "model": model,
            "weights": directory_digest(Path(model)) if Path(model).is_dir() else None,
            **own,
            "environment": {
                name: os.environ[name]
                for name in (*envs.TABLE, "VLLM_BATCH_INVARIANT", "VLLM_USE_V2_MODEL_RUNNER")
                if os.environ.get(name)
            },
            "versions": {"deepinfer-vllm": __version__, "vllm": version("vllm")},
        }
        kept: dict[str, Any] = hidden(recorded)
        return kept


def template_arguments(thinking: str) -> dict[str, Any]:
    """What the chat template is told: nothing, on or off, or an effort. Raises EvaluationError for anything else."""
    if thinking == "auto":
        return {}
    if thinking in ("on", "off"):
        return dict.fromkeys(("thinking", "enable_thinking"), thinking == "on")
    if thinking in ("low", "high", "xhigh", "max") or (thinking.isdecimal() and 1 <= int(thinking[:4]) <= 100):
        effort = int(thinking) if thinking.isdecimal() else thinking
        return {"thinking": True, "enable_thinking": True, "reasoning_effort": effort}
    raise EvaluationError(f"--thinking {thinking!r}: auto, on, off, low, high, xhigh, max or a number from 1 to 100")


def sampling_params(values: Mapping[str, Any]) -> Any:
    """vLLM's SamplingParams of values as JSON has them, nested objects too.

    Raises EvaluationError for a value of another type or beyond its limits.
    """
    import msgspec
    from vllm import SamplingParams

    try:
        return msgspec.convert(values, SamplingParams, strict=False)
    except Exception as error:  # msgspec's and vLLM's own are no ValueErrors
        raise EvaluationError(f"sampling parameters: {' '.join(str(error).split())}") from error


def engine_names() -> list[str]:
    """What vLLM's `LLM` may be told."""
    from vllm.engine.arg_utils import EngineArgs

    return [field.name for field in dataclasses.fields(EngineArgs) if field.name != "model"]


def sampling_names() -> list[str]:
    """What a request may say, but for what has a flag."""
    from vllm import SamplingParams

    fields = SamplingParams.__struct_fields__
    return [name for name in fields if not name.startswith("_") and name not in OWN_SAMPLING]


def pairs(texts: Sequence[str], flag: str, known: Sequence[str]) -> dict[str, Any]:
    """`key=value` each, or a JSON object of several; values are JSON where they can be, else text.

    Raises EvaluationError for another form and for a key that is not `known`, with the nearest that is.
    """
    found: dict[str, Any] = {}
    for text in texts:
        if text.lstrip().startswith("{"):
            try:
                found.update(json.loads(text))
            except (ValueError, RecursionError) as error:
                raise EvaluationError(f"{flag} {text!r}: no JSON ({error})") from None
            continue
        name, equals, value = text.partition("=")
        if not equals:
            raise EvaluationError(f"{flag} {text!r}: give key=value, or a JSON object")
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError):
            found[name] = value
    named = {name.strip().lstrip("-").replace("-", "_"): value for name, value in found.items()}
    for name in named:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise EvaluationError(f"{flag} {name}: vLLM has no such name" + (f"; {near[0]}?" if near else ""))
    return named
