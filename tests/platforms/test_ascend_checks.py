"""Every condition for DeepSeek-V4.1 on Ascend by itself, all in one error of a real configuration, and their page."""

import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from configured_engines import CASES, GRAFTED, STOCK

from deepinfer_vllm.kv_connector import CONNECTOR
from deepinfer_vllm.models import ARCHITECTURE, PORTABLE_CLASSES
from deepinfer_vllm.platforms.conditions import (
    ENGINE,
    INSTALLATION,
    link,
    markdown_table,
    release,
    unmet,
    unmet_by_installation,
)
from deepinfer_vllm.platforms.detection import AscendStack
from deepinfer_vllm.platforms.engine_facts import EngineFacts, Implementation, implementation

STACK = AscendStack(
    vllm_ascend=("0.32.0rc1",), torch_npu=("2.13.0.post1",), vllm="0.32.0+cpu", torch="2.13.0+cpu", built_for="A5"
)
MODULES = {
    Implementation.PORTABLE: "deepinfer_vllm.models.deepseek_v41",
    Implementation.ASCEND: "vllm_ascend.models.deepseek_v41.vl_model",
    Implementation.OTHER: "vllm.models.deepseek_v41",
}


def facts(owner: Implementation, **changes: Any) -> EngineFacts:
    """An engine that meets all conditions of `owner`'s but those of the 950 alone, with changes."""
    stack = changes.pop("stack", STACK)
    return EngineFacts(stack=stack, classes=dict.fromkeys(PORTABLE_CLASSES, MODULES[owner]), **changes)


def test_whose_a_class_is() -> None:
    assert {owner: implementation(module) for owner, module in MODULES.items()} == {owner: owner for owner in MODULES}
    assert implementation("vllm_ascendant.models") is implementation("") is Implementation.OTHER


def test_an_engine_that_meets_all() -> None:
    assert unmet(facts(Implementation.PORTABLE)) == []


@pytest.mark.parametrize(
    ("whole", "expected"),
    [("0.32.0+cpu", "0.32"), ("0.23.0.post1", "0.23"), ("0.1.dev7+gabc", "0.1"), ("2.13.0rc1", "2.13"), ("x", "x")],
)
def test_release(whole: str, expected: str) -> None:
    assert release(whole) == expected


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        (
            {"vllm_ascend": ("0.23.0.post1",)},
            "vllm-ascend 0.23.0.post1 (must be made for vLLM 0.32: versions are equal up to the minor; "
            "vllm-ascend#16375)",
        ),
        (
            {"vllm_ascend": ("0.31.0", "0.32.0")},
            "vllm-ascend 0.31.0 (the first of 2 copies) (must be made for vLLM 0.32: versions are equal up to the "
            "minor; vllm-ascend#16375)",
        ),
        (
            {"torch_npu": ("2.10.0.post4",)},
            "torch-npu 2.10.0.post4 (must be of the minor of torch 2.13.0+cpu; Ascend/pytorch#105)",
        ),
        ({"torch_npu": ()}, "torch-npu none (must be of the minor of torch 2.13.0+cpu; Ascend/pytorch#105)"),
        (
            {"built_for": "_310P"},
            "vllm-ascend built for _310P (must be built for A5, the Ascend 950; vllm-ascend#16375)",
        ),
    ],
)
def test_what_is_installed(changes: dict[str, Any], phrase: str) -> None:
    stack = replace(STACK, **changes)
    assert unmet_by_installation(stack) == [phrase]
    for owner in Implementation:  # whoever's model it is
        assert phrase in unmet(facts(owner, stack=stack))


DRAFT = "DSparkV41DraftModel"
BOTH, THEIRS, EVERY = (
    {Implementation.PORTABLE, Implementation.ASCEND},
    {Implementation.ASCEND},
    set(Implementation),
)
BROKEN: list[tuple[set[Implementation], dict[str, Any], str]] = [
    (
        {Implementation.OTHER},
        {},
        "DeepseekV41ForCausalLM of vllm.models.deepseek_v41, DSparkV41DraftModel of vllm.models.deepseek_v41 (must be ",
    ),
    (
        EVERY,
        {"classes": {ARCHITECTURE: MODULES[Implementation.PORTABLE], DRAFT: "vllm.models.deepseek_v41"}},
        "DSparkV41DraftModel of vllm.models.deepseek_v41 (must be deepinfer_vllm's or vllm_ascend's: ",
    ),
    (
        THEIRS,
        {"wanted_model": "portable"},
        "DeepseekV41ForCausalLM of vllm_ascend.models.deepseek_v41.vl_model (must be ours under DEEPINFER_VLLM_MODEL=",
    ),
    (THEIRS, {}, "vllm-ascend's own V4.1 on A5 (must be the portable one, DEEPINFER_VLLM_MODEL=portable"),
    (THEIRS, {"pipeline_parallel": 2}, "--pipeline-parallel-size=2 (must be 1; vllm-ascend#10061)"),
    (THEIRS, {"decode_context_parallel": 4}, "--decode-context-parallel-size=4 (must be 1; vllm-ascend#12622)"),
    (THEIRS, {"prefill_context_parallel": 2}, "--prefill-context-parallel-size=2 (must be 1; vllm-ascend#16375)"),
    (
        THEIRS,
        {"tensor_parallel": 2},
        "--tensor-parallel-size=2, 32 query heads a rank of 64 (must be such that a rank has 64 or 128; recipes#948)",
    ),
    (BOTH, {"eplb": True, "fp4_experts": True}, "--enable-eplb with MXFP4 experts (must be off"),
    (BOTH, {"kv_connectors": ("Mooncake",)}, "--kv-transfer-config with Mooncake (must be "),
    (THEIRS, {"kv_connectors": (CONNECTOR,)}, f"--kv-transfer-config with {CONNECTOR} (must be unset; "),
    (THEIRS, {"runner_v2": True}, "model runner V2 (must be V1, VLLM_USE_V2_MODEL_RUNNER=0; vllm-ascend#16375)"),
    (
        THEIRS,
        {"draft_tokens": 32},
        "num_speculative_tokens=32 (must be at most 31: the compressor's ring has 32 rows; ",
    ),
]


@pytest.mark.parametrize(("owners", "changes", "phrase"), BROKEN)
def test_an_engine_condition_holds_for_some_models(
    owners: set[Implementation], changes: dict[str, Any], phrase: str
) -> None:
    for owner in Implementation:
        engine = facts(owner, **{name: value for name, value in changes.items() if name != "classes"})
        if "classes" in changes:
            engine = replace(engine, classes=changes["classes"])
        found = [text for text in unmet(engine) if text.startswith(phrase)]
        assert len(found) == (owner in owners), unmet(engine)


@pytest.mark.parametrize(
    "changes",
    [
        {"tensor_parallel": 1, "heads": 128},
        {"tensor_parallel": 2, "heads": 128},
        {"eplb": True},
        {"fp4_experts": True},
        {"draft_tokens": 31},
    ],
)
def test_limits_are_where_they_are_said_to_be(changes: dict[str, Any]) -> None:
    a3 = replace(STACK, built_for="A3")
    assert unmet(facts(Implementation.ASCEND, stack=a3, **changes)) == unmet_by_installation(a3)


def test_every_row_is_broken_here_and_has_a_thread() -> None:
    broken = {phrase for _, _, phrase in BROKEN}
    assert len(broken) == len(BROKEN) >= len(ENGINE)
    for row in (*INSTALLATION, *ENGINE):
        assert re.fullmatch(r"([\w-]+/)?[\w-]+#\d+", row.thread) and row.needs and row.versions and row.holds_for


def test_links() -> None:
    assert link("vllm-ascend#17122") == "https://github.com/vllm-project/vllm-ascend/issues/17122"
    assert link("Ascend/pytorch#105") == "https://github.com/Ascend/pytorch/issues/105"


def test_the_page_has_this_table(root: Path) -> None:
    page = (root / "docs/ascend.md").read_text()
    assert markdown_table() in page, "put `python -m deepinfer_vllm.platforms.conditions` into docs/ascend.md"


@pytest.mark.vllm
def test_one_error_has_all_that_is_unmet(configured: dict[str, Any]) -> None:
    error = configured["much at once"]["error"]
    assert error.count("The portable DeepSeek-V4.1 cannot run with ") == 1
    for phrase in (
        "--pipeline-parallel-size=2 (must be 1",  # the model's own conditions
        "--enable-lora=True",
        "vllm-ascend 0.23.0 (must be made for vLLM 0.32",  # and the platform's
        "torch-npu 2.10.0 (must be of the minor of torch 2.13",
        "vllm-ascend built for A3",
        "--kv-transfer-config with OffloadingConnector (must be DeepInfer3FSConnector or unset",
    ):
        assert error.count(phrase) == 1, error
    assert configured["much at once"]["config"] is None


@pytest.mark.vllm
def test_the_class_for_nvidia_is_refused(configured: dict[str, Any]) -> None:
    answer = configured["upstream's class"]
    assert "DeepSeek-V4.1 cannot run on this Ascend platform with " in answer["error"]
    assert "DeepseekV41ForCausalLM of vllm.models.deepseek_v41" in answer["error"] and answer["config"] is None
    assert answer["arch"] == (
        "ValueError: DeepseekV41ForCausalLM is vllm.models.deepseek_v41's, which does not run on an NPU: unset "
        "DEEPINFER_VLLM_MODEL for the portable one"
    )


@pytest.mark.vllm
def test_experts_that_are_widened_are_not_mxfp4(configured: dict[str, Any]) -> None:
    packed, widened = configured["packed experts that move"], configured["widened experts that move"]
    assert packed["error"] == widened["error"] == ""
    assert packed["problems"] == [
        "--enable-eplb with MXFP4 experts (must be off or their weights widened, DEEPINFER_VLLM_WEIGHTS=bf16; "
        "vllm-ascend#16351)"
    ]
    assert widened["problems"] == []


@pytest.mark.vllm
def test_an_engine_that_may_run_reaches_vllm_ascend(configured: dict[str, Any]) -> None:
    answer = configured["plain"]
    assert answer["config"] is not None and answer["error"] == answer["arch"] == ""


@pytest.mark.vllm
def test_other_models_pass_through_on_any_stack(configured: dict[str, Any]) -> None:
    assert CASES["llama on a stack that does not fit"].stack == "unfit"
    answer, stock = configured["llama on a stack that does not fit"], configured["llama, platform off"]
    assert answer["platform"] == GRAFTED and stock["platform"] == STOCK
    assert answer["error"] == stock["error"] == ""
    assert answer["config"] == stock["config"] is not None and answer["hash"] == stock["hash"] != ""


@pytest.mark.vllm
def test_patches_for_another_vllm_are_one_sentence(configured: dict[str, Any]) -> None:
    assert configured["patches that fail"]["error"] == (
        "RuntimeError: vllm-ascend cannot be used here: vllm-ascend 0.23.0 (must be made for vLLM 0.32: versions are "
        "equal up to the minor; vllm-ascend#16375), torch-npu 2.10.0 (must be of the minor of torch "
        f"{version('torch')}; Ascend/pytorch#105), vllm-ascend built for A3 (must be built for A5, the Ascend 950; "
        "vllm-ascend#16375). It says: No module named 'vllm.entrypoints.gone'"
    )
    assert configured["patches that fail though all fits"]["error"] == (
        "RuntimeError: vllm-ascend cannot be used here: it changes a vLLM that is not this one. It says: "
        "No module named 'vllm.entrypoints.gone'"
    )


@pytest.mark.vllm
def test_kernels_are_put_in_place_where_cann_is_and_through_vllms_hook_alone(configured: dict[str, Any]) -> None:
    portable, ours = "deepinfer_vllm.models.deepseek_v41.mhc", "deepinfer_vllm.platforms.tilelang.delayed_mhc"
    assert {name: answer["kernel"] for name, answer in configured.items() if answer["kernel"]} == {
        "CANN with TileLang": ours,
        "CANN without TileLang": portable,
    }
