"""Every environment variable of this plugin, in one table.

A variable is read when it is accessed (`envs.DEEPINFER_VLLM_MODEL`), so the order of imports does not matter.
vLLM warns about unknown variables that start with `VLLM_` only, so these names need no entry in its own table.
`python -m deepinfer_vllm.envs` prints the table of docs/configuration.md.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    DEEPINFER_VLLM_MODEL: Literal["auto", "portable", "upstream"]
    DEEPINFER_VLLM_ASCEND: Literal["auto", "off", "force"]
    DEEPINFER_VLLM_DECODER_REPLAY: bool
    DEEPINFER_VLLM_NUMERICS: Literal["plain", "qat"]
    DEEPINFER_VLLM_WEIGHTS: Literal["packed", "bf16", "fp32"]
    DEEPINFER_VLLM_NATIVE: bool
    DEEPINFER_VLLM_KERNELS: Literal["torch", "triton"]
    DEEPINFER_VLLM_DSPARK_BUDGET: Literal["auto", "early-stop", "delayed", "fixed"]
    DEEPINFER_VLLM_DSPARK_CALIBRATION: str
    DEEPINFER_VLLM_DSPARK_RECORD: str
    DEEPINFER_VLLM_DSPARK_GRAMMAR: bool
    DEEPINFER_VLLM_EPLB: Literal["off", "prefill", "decode"]
    DEEPINFER_VLLM_EPLB_POLICY: Literal["deepinfer", "vllm"]
    DEEPINFER_VLLM_EPLB_MAX_MIGRATION: int
    DEEPINFER_VLLM_EPLB_RECORD: str
    DEEPINFER_VLLM_SCHED_TARGET_MS: float
    DEEPINFER_VLLM_SCHED_PREFILL_SHARE: float
    DEEPINFER_VLLM_SCHED_GRID: int
    DEEPINFER_VLLM_SCHED_CHUNK: int
    DEEPINFER_VLLM_SCHED_CONTEXT: int
    DEEPINFER_VLLM_SCHED_COSTS: str

Value = str | bool | int | float


@dataclass(frozen=True)
class Variable:
    """One variable. `parse` turns its text into a value and raises ValueError on text that `allowed` does not cover."""

    name: str
    allowed: str
    default: str
    parse: Callable[[str], Value]
    doc: str


def _choice(name: str, words: tuple[str, ...], default: str, doc: str) -> Variable:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(text)
        return text

    return Variable(name, " or ".join(words), default, parse, doc)


def _flag(name: str, default: str, doc: str) -> Variable:
    return Variable(name, "1 or 0", default, lambda text: {"1": True, "0": False}[text], doc)


def _bytes(name: str, default: str, doc: str) -> Variable:
    def parse(text: str) -> int:
        number, unit = text.rstrip("KMG"), text[len(text.rstrip("KMG")) :]
        if not number.isdecimal():
            raise ValueError(text)
        return int(number) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[unit]

    return Variable(name, "a number of bytes, with K, M or G for KiB, MiB or GiB", default, parse, doc)


def _path(name: str, allowed: str, default: str, doc: str) -> Variable:
    return Variable(name, allowed, default, str, doc)


def _number(name: str, kind: type[int] | type[float], least: float, most: float, default: str, doc: str) -> Variable:
    def parse(text: str) -> int | float:
        if not least <= (number := kind(text)) <= most:
            raise ValueError(text)
        return number

    return Variable(name, f"{least} to {most}", default, parse, doc)


TABLE: dict[str, Variable] = {
    variable.name: variable
    for variable in (
        _choice(
            "DEEPINFER_VLLM_MODEL",
            ("auto", "portable", "upstream"),
            default="auto",
            doc="Which DeepSeek-V4.1 model class serves. `auto` is `portable` (ours, pure PyTorch) on CPU and"
            " out-of-tree platforms and `upstream` (vLLM's own) on CUDA and ROCm.",
        ),
        _choice(
            "DEEPINFER_VLLM_ASCEND",
            ("auto", "off", "force"),
            default="auto",
            doc="Whether [our platform](ascend.md) takes the place of vllm-ascend's. `auto`: where vllm-ascend,"
            " torch-npu and an NPU are here. `force`: without looking for the NPU and for CANN.",
        ),
        _flag(
            "DEEPINFER_VLLM_DECODER_REPLAY",
            default="1",
            doc="Past the last KV source layer, prefill runs only each request's last window rows. `0` runs every row.",
        ),
        _choice(
            "DEEPINFER_VLLM_NUMERICS",
            ("plain", "qat"),
            default="plain",
            doc="`qat` fake-quantises the KV cache and the indexer as the released model was trained.",
        ),
        _choice(
            "DEEPINFER_VLLM_WEIGHTS",
            ("packed", "bf16", "fp32"),
            default="packed",
            doc="How linears and experts are held. `packed`: as in the checkpoint, quantised ones widened as they are"
            " used and plain ones in the model's dtype. `bf16`, `fp32`: widened to that at load, for more memory.",
        ),
        _flag(
            "DEEPINFER_VLLM_NATIVE",
            default="1",
            doc="Build small C libraries with the system's compiler, once, into `~/.cache/deepinfer_vllm` (kernels"
            " for the CPU) and `~/.cache/deepinfer_kvstore` (the store's hash chain), and use them. Without a compiler,"
            " or with `0`, PyTorch and Python do the same work in more steps.",
        ),
        _choice(
            "DEEPINFER_VLLM_KERNELS",
            ("torch", "triton"),
            default="torch",
            doc="What the portable model's attention and hyper-connections run on a device that Triton compiles for:"
            " PyTorch's operations, or a kernel for each.",
        ),
        _choice(
            "DEEPINFER_VLLM_DSPARK_BUDGET",
            ("auto", "early-stop", "delayed", "fixed"),
            default="auto",
            doc="How many of DSpark's drafts a step verifies. `early-stop` decides on the confidences of these drafts,"
            " `delayed` on those of the step before; `auto` takes the first where the host has them in time. `fixed`"
            " verifies all, as vLLM does by itself.",
        ),
        _path(
            "DEEPINFER_VLLM_DSPARK_CALIBRATION",
            "auto, off or a file",
            default="auto",
            doc="Temperatures for DSpark's confidences, as `deepinfer calibrate-dspark` writes them. `auto` takes those"
            " beside the checkpoint, if there are any; `off` takes the confidences as they are.",
        ),
        _path(
            "DEEPINFER_VLLM_DSPARK_RECORD",
            "a file, or empty",
            default="",
            doc="Where to record what DSpark drafted, how sure it was, and what was accepted, for calibration. Empty"
            " records nothing.",
        ),
        _flag(
            "DEEPINFER_VLLM_DSPARK_GRAMMAR",
            default="1",
            doc="Draft only tokens that a request's grammar allows. `0` drafts without looking at it; answers keep to"
            " the grammar either way.",
        ),
        _choice(
            "DEEPINFER_VLLM_EPLB",
            ("off", "prefill", "decode"),
            default="off",
            doc="With `--enable-eplb`, what `--eplb-config` leaves unset. `prefill`: 4 redundant experts a rank, a"
            " window of 100 steps, rebalancing every 1,000; `decode`: 1, 1,000 and 10,000. `off`: vLLM's defaults.",
        ),
        _choice(
            "DEEPINFER_VLLM_EPLB_POLICY",
            ("deepinfer", "vllm"),
            default="deepinfer",
            doc="Whose policy places experts when EPLB rebalances. `vllm` leaves placement to vLLM; loads are measured"
            " either way.",
        ),
        _bytes(
            "DEEPINFER_VLLM_EPLB_MAX_MIGRATION",
            default="0",
            doc="Most bytes of expert weights that one rebalancing moves, over all layers and ranks together; the next"
            " goes on from there. `0` sets no limit.",
        ),
        _path(
            "DEEPINFER_VLLM_EPLB_RECORD",
            "a file, or empty",
            default="",
            doc="Where to record the loads of experts, step by step, for `deepinfer eplb analyze`: at most 4,096 steps"
            " or 256 MiB. Empty records nothing.",
        ),
        _number(
            "DEEPINFER_VLLM_SCHED_TARGET_MS",
            float,
            0,
            600_000,
            default="50",
            doc="Milliseconds that 99 of 100 tokens of a running decode take at most, as far as chunks of prompts go:"
            " [the chunk scheduler](scheduling.md) cuts these so that steps keep to it. 0 is throughput mode: chunks as"
            " large as they may be.",
        ),
        _number(
            "DEEPINFER_VLLM_SCHED_PREFILL_SHARE",
            float,
            0,
            0.9,
            default="0.25",
            doc="What prompts get at least of the tokens a second that they would get in throughput mode, be the target"
            " missed for it. 0: where decodes leave no time, a piece of the grid a step.",
        ),
        _number(
            "DEEPINFER_VLLM_SCHED_GRID",
            int,
            1,
            32_768,
            default="128",
            doc="Chunks of prompts end at multiples of so many tokens.",
        ),
        _number(
            "DEEPINFER_VLLM_SCHED_CHUNK",
            int,
            1,
            1 << 20,
            default="32768",
            doc="The most tokens of one chunk; `--max-num-batched-tokens` limits a step.",
        ),
        _number(
            "DEEPINFER_VLLM_SCHED_CONTEXT",
            int,
            0,
            1 << 40,
            default="0",
            doc="The most tokens that the chunks of a step reach up to, each with what is before it, added up. 0: no"
            " limit.",
        ),
        _path(
            "DEEPINFER_VLLM_SCHED_COSTS",
            "a file, or empty",
            default="",
            doc="Where the chunk scheduler reads what steps cost at start, and writes what it has learnt. Empty: it"
            " starts from a published engine's costs, and writes none.",
        ),
    )
}


def read(name: str) -> Value:
    """The value of variable `name` now; unset or empty means its default.

    Raises KeyError for a name that is not in the table and ValueError for text that is not allowed.
    """
    variable = TABLE[name]
    text = os.environ.get(name) or variable.default
    try:
        return variable.parse(text)
    except (ValueError, KeyError):
        raise ValueError(
            f"{name}={text!r}: the value must be {variable.allowed}. Set one of these, or unset {name} for the default "
            f"({variable.default})."
        ) from None


def check() -> None:
    """Raises ValueError for the first variable whose text is not allowed."""
    for name in TABLE:
        read(name)


def markdown_table() -> str:
    """The table as docs/configuration.md shows it."""
    rows = [f"| `{v.name}` | {v.allowed} | {v.default} | {v.doc} |" for v in TABLE.values()]
    return "\n".join(["| Variable | Values | Default | Effect |", "| --- | --- | --- | --- |", *rows])


def __getattr__(name: str) -> Value:
    if name not in TABLE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return read(name)


def __dir__() -> list[str]:
    return [*globals(), *TABLE]


if __name__ == "__main__":
    print(markdown_table())
