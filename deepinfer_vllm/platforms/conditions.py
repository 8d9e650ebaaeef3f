"""What must hold before DeepSeek-V4.1 starts on an Ascend NPU: a row a condition, with the thread that would lift it.

Nothing of this has run on an Ascend 950. A row stands for what is public about vllm-ascend and its operators; whoever
lifts one changes its row. `python -m deepinfer_vllm.platforms.conditions` prints the table of docs/ascend.md.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from deepinfer_vllm.kv_connector import CONNECTOR
from deepinfer_vllm.models import ARCHITECTURE
from deepinfer_vllm.platforms.detection import AscendStack
from deepinfer_vllm.platforms.engine_facts import EngineFacts, Implementation

Unmet = tuple[str, str]
"""What was found, and what it must be."""

ANY = frozenset(Implementation)
ASCEND = frozenset({Implementation.ASCEND})
PORTABLE = frozenset({Implementation.PORTABLE})


@dataclass(frozen=True)
class InstallationCondition:
    """A condition on what is installed, whichever model class serves."""

    needs: str
    versions: str
    thread: str
    unmet: Callable[[AscendStack], Unmet | None]
    holds_for = ANY


@dataclass(frozen=True)
class EngineCondition:
    """A condition on an engine's configuration, for the implementations in `holds_for`."""

    needs: str
    holds_for: Collection[Implementation]
    versions: str
    thread: str
    unmet: Callable[[EngineFacts], Unmet | None]


def release(version: str) -> str:
    """Major and minor of a version, as 0.32 of 0.32.0+cpu; a version without them is itself."""
    found = re.match(r"\d+\.\d+", version)
    return found[0] if found else version


def _one_release(stack: AscendStack) -> Unmet | None:
    theirs = stack.vllm_ascend[0] if stack.vllm_ascend else "none"
    copies = f" (the first of {len(stack.vllm_ascend)} copies)" if len(stack.vllm_ascend) > 1 else ""
    if release(theirs) == release(stack.vllm):
        return None
    return f"vllm-ascend {theirs}{copies}", f"made for vLLM {release(stack.vllm)}: versions are equal up to the minor"


def _one_torch(stack: AscendStack) -> Unmet | None:
    theirs = stack.torch_npu[0] if stack.torch_npu else "none"
    if release(theirs) == release(stack.torch):
        return None
    return f"torch-npu {theirs}", f"of the minor of torch {stack.torch}"


def _built_for_950(stack: AscendStack) -> Unmet | None:
    if stack.built_for == "A5":
        return None
    return f"vllm-ascend built for {stack.built_for or 'an unknown NPU'}", "built for A5, the Ascend 950"


def _class(facts: EngineFacts) -> Unmet | None:
    foreign = [f"{name} of {module}" for name, module in facts.classes.items() if not _runs(module)]
    if foreign:
        return ", ".join(foreign), "deepinfer_vllm's or vllm_ascend's: vLLM's own is for NVIDIA or AMD"
    if facts.wanted_model == "portable" and facts.implementation is not Implementation.PORTABLE:
        return f"{ARCHITECTURE} of {facts.classes[ARCHITECTURE]}", "ours under DEEPINFER_VLLM_MODEL=portable"
    return None


def _runs(module: str) -> bool:
    return module.partition(".")[0] in ("deepinfer_vllm", "vllm_ascend")


def _own_model_on_950(facts: EngineFacts) -> Unmet | None:
    if facts.stack.built_for != "A5":
        return None
    return "vllm-ascend's own V4.1 on A5", "the portable one, DEEPINFER_VLLM_MODEL=portable, until its HcPre is mended"


def _size(flag: str, size: Callable[[EngineFacts], int]) -> Callable[[EngineFacts], Unmet | None]:
    def unmet(facts: EngineFacts) -> Unmet | None:
        return (f"{flag}={size(facts)}", "1") if size(facts) > 1 else None

    return unmet


def _local_heads(facts: EngineFacts) -> Unmet | None:
    local = facts.heads // facts.tensor_parallel
    if local in (64, 128):
        return None
    found = f"--tensor-parallel-size={facts.tensor_parallel}, {local} query heads a rank of {facts.heads}"
    return found, "such that a rank has 64 or 128"


def _eplb(facts: EngineFacts) -> Unmet | None:
    if not (facts.eplb and facts.fp4_experts):
        return None
    widened = " or their weights widened, DEEPINFER_VLLM_WEIGHTS=bf16"
    return "--enable-eplb with MXFP4 experts", "off" + (widened if facts.implementation in PORTABLE else "")


def _kv_transfer(facts: EngineFacts) -> Unmet | None:
    allowed = {CONNECTOR} if facts.implementation in PORTABLE else set()
    refused = [name for name in facts.kv_connectors if name not in allowed]
    must = f"{CONNECTOR} or unset" if allowed else "unset"
    return (f"--kv-transfer-config with {', '.join(refused)}", must) if refused else None


def _runner(facts: EngineFacts) -> Unmet | None:
    return ("model runner V2", "V1, VLLM_USE_V2_MODEL_RUNNER=0") if facts.runner_v2 else None


def _drafts(facts: EngineFacts) -> Unmet | None:
    found = f"num_speculative_tokens={facts.draft_tokens}"
    return (found, "at most 31: the compressor's ring has 32 rows") if facts.draft_tokens > 31 else None


VERSIONS = (
    InstallationCondition(
        "vllm-ascend and vLLM of one release",
        "0.23.0.post1, the newest release seen, is for vLLM 0.23",
        "vllm-ascend#16375",
        _one_release,
    ),
    InstallationCondition("torch-npu and torch of one minor", "every release", "Ascend/pytorch#105", _one_torch),
)
INSTALLATION = (
    *VERSIONS,
    InstallationCondition("vllm-ascend built for the Ascend 950", "every release", "vllm-ascend#16375", _built_for_950),
)

ENGINE = (
    EngineCondition(
        "V4.1 classes that run on NPUs", ANY, "vLLM 0.32 and 0.33 name NVIDIA's", "vllm-ascend#16375", _class
    ),
    EngineCondition(
        "streams weighted as the model says (HcPre)",
        ASCEND,
        "until one has the change",
        "vllm-ascend#17122",
        _own_model_on_950,
    ),
    EngineCondition(
        "no pipeline parallelism",
        ASCEND,
        "every release",
        "vllm-ascend#10061",
        _size("--pipeline-parallel-size", lambda facts: facts.pipeline_parallel),
    ),
    EngineCondition(
        "no decode context parallelism",
        ASCEND,
        "every release",
        "vllm-ascend#12622",
        _size("--decode-context-parallel-size", lambda facts: facts.decode_context_parallel),
    ),
    EngineCondition(
        "no prefill context parallelism",
        ASCEND,
        "every release",
        "vllm-ascend#16375",
        _size("--prefill-context-parallel-size", lambda facts: facts.prefill_context_parallel),
    ),
    EngineCondition("64 or 128 query heads a rank", ASCEND, "every release", "recipes#948", _local_heads),
    EngineCondition("no EPLB with MXFP4 experts", ASCEND | PORTABLE, "every release", "vllm-ascend#16351", _eplb),
    EngineCondition(
        f"no KV transfer, but for the portable model the store's {CONNECTOR}",
        ASCEND | PORTABLE,
        "every release",
        "vllm-ascend#16375",
        _kv_transfer,
    ),
    EngineCondition("model runner V1", ASCEND, "every release", "vllm-ascend#16375", _runner),
    EngineCondition("at most 31 drafted tokens a step", ASCEND, "every release", "vllm-ascend#16375", _drafts),
)


def unmet_by_installation(stack: AscendStack, rows: Sequence[InstallationCondition] = INSTALLATION) -> list[str]:
    """One phrase for each condition of `rows` that what is installed does not meet: found (must be ...; thread)."""
    return [_phrase(found, row.thread) for row in rows if (found := row.unmet(stack))]


def unmet(facts: EngineFacts) -> list[str]:
    """One phrase for each condition that an engine does not meet, those on what is installed first."""
    rows = [row for row in ENGINE if facts.implementation in row.holds_for]
    engine = [_phrase(found, row.thread) for row in rows if (found := row.unmet(facts))]
    return unmet_by_installation(facts.stack) + engine


def _phrase(found: Unmet, thread: str) -> str:
    return f"{found[0]} (must be {found[1]}; {thread})"


def markdown_table() -> str:
    """The table as docs/ascend.md shows it."""
    rows = ["| What must hold | for the V4.1 of | vllm-ascend | Thread |", "| --- | --- | --- | --- |"]
    for row in (*INSTALLATION, *ENGINE):
        owners = "anyone" if row.holds_for == ANY else ", ".join(sorted(row.holds_for))
        rows.append(f"| {row.needs} | {owners} | {row.versions} | [{row.thread}]({link(row.thread)}) |")
    return "\n".join(rows)


def link(thread: str) -> str:
    """The address of a thread, as vllm-ascend#1 or owner/repository#1."""
    repository, _, number = thread.partition("#")
    owned = repository if "/" in repository else f"vllm-project/{repository}"
    return f"https://github.com/{owned}/issues/{number}"


if __name__ == "__main__":
    print(markdown_table())
