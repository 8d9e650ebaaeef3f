"""A checkpoint or a flag that the model cannot serve stops vLLM at once, with what, value, limit and remedy."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from deepinfer_vllm.server_process import SMALL_CPU_ENVIRONMENT, SMALL_CPU_FLAGS, vllm_script

Edit = Callable[[dict[str, Any]], None]


def text(**fields: Any) -> Edit:
    """Set fields of `text_config`."""
    return lambda config: config["text_config"].update(fields)


ILLEGAL_CONFIGS: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "ratio": (
        text(compress_ratios=[0, 0, 2, 2, 3, 1, 1, 1]),
        ("compress_ratios[4]=3", "must be 0 (window only), 1 or 2", "Correct config.json"),
    ),
    "compressed layer without a source": (
        text(kv_source_layer_ids=[4, 5], index_source_layer_ids=[4, 5, 7]),
        ("compress_ratios[2]=2", "kv_source_layer_ids=[4, 5]", "Add a layer id at or below 2"),
    ),
    "heads": (
        text(o_groups=3),
        ("num_attention_heads=8", "multiple of o_groups=3", "Correct config.json"),
    ),
    "table rows of the hash": (
        text(engram_num_embeddings=[100, 200]),
        ("engram_num_embeddings=100", "layer 1 addresses", "Correct it"),
    ),
    "quantisation": (
        lambda config: config.update(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
        ("quantization_config.weight_block_size=[128, 128]", "published format only", "Convert the checkpoint"),
    ),
}

ILLEGAL_FLAGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "tensor parallel": (
        {"tensor_parallel_size": 8},
        ("--tensor-parallel-size=8", "must be a divisor of o_groups=4"),
    ),
    "experts": (
        {"tensor_parallel_size": 4, "data_parallel_size": 3},
        (
            "--tensor-parallel-size=4 times --data-parallel-size=3",
            "moe_intermediate_size=64",
            "--enable-expert-parallel",
        ),
    ),
    "more ranks than experts": (
        {"tensor_parallel_size": 4, "data_parallel_size": 3, "enable_expert_parallel": True},
        ("--enable-expert-parallel=True over 12 processes", "at most n_routed_experts=8"),
    ),
    "pipeline parallel": ({"pipeline_parallel_size": 2}, ("--pipeline-parallel-size=2", "must be 1", "(2-3, 4, 5-7)")),
    "decode context parallel": (
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        ("--decode-context-parallel-size=2", "must be 1"),
    ),
    "embeddings of images": ({"enable_mm_embeds": True}, ("--enable-mm-embeds=True", "must be off")),
    "an encoder alone": ({"mm_encoder_only": True}, ("--mm-encoder-only=True", "must be off")),
    "one kind of cache": (
        {"disable_hybrid_kv_cache_manager": True},
        ("--disable-hybrid-kv-cache-manager=True", "must be off"),
    ),
    "cache dtype": ({"kv_cache_dtype": "fp8"}, ("--kv-cache-dtype=fp8", "must be auto")),
    "another way to draft": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
        ("--speculative-config method=ngram", 'must be "dspark"'),
    ),
    "quantisation": ({"quantization": "fp8"}, ("--quantization=fp8", "must be unset", "DEEPINFER_VLLM_WEIGHTS")),
    "adapters": ({"enable_lora": True}, ("--enable-lora=True", "must be off")),
    "odd blocks": ({"block_size": 33}, ("--block-size=33", "must be even")),
}


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """The tiny checkpoint, to be spoilt."""
    return shutil.copytree(checkpoint, tmp_path / "spoilt")


def edit_config(directory: Path, edit: Edit) -> None:
    """Change config.json in place."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


def start_error(directory: Path, **flags: Any) -> str:
    """What vLLM says when it is to configure an engine for this checkpoint: the stage before any process starts."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(directory),
        dtype="float32",
        max_model_len=4096,
        kv_cache_memory_bytes=2**28,
        enforce_eager=True,
        **flags,
    )
    with pytest.raises(ValueError) as caught:
        arguments.create_engine_config()
    return str(caught.value)


def says(message: str, parts: tuple[str, ...]) -> None:
    """The message holds every part, and it is one error."""
    assert [part for part in parts if part not in message] == [], message
    assert message.startswith("1 validation error"), message


@pytest.mark.parametrize("name", ILLEGAL_CONFIGS)
def test_illegal_config(copy: Path, name: str) -> None:
    edit, parts = ILLEGAL_CONFIGS[name]
    edit_config(copy, edit)
    says(start_error(copy), parts)


@pytest.mark.parametrize("name", ILLEGAL_FLAGS)
def test_illegal_flag(checkpoint: Path, name: str) -> None:
    flags, parts = ILLEGAL_FLAGS[name]
    says(start_error(checkpoint, **flags), parts)


DRAFTS = {"method": "dspark", "num_speculative_tokens": 5}
ILLEGAL_DRAFTS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    # the runner's switch, more fields of --speculative-config, what is said
    "runner V1": ("0", {}, ("VLLM_USE_V2_MODEL_RUNNER=0", "must be 1 or unset with --speculative-config")),
    "as many as the window": (
        "1",
        {"num_speculative_tokens": 128},
        ("num_speculative_tokens=128", "must be below sliding_window=128"),
    ),
    "another cache": ("1", {"kv_cache_dtype": "fp8"}, ("kv_cache_dtype=fp8", "must be left away")),
}


@pytest.mark.parametrize("name", ILLEGAL_DRAFTS)
def test_illegal_drafts(checkpoint: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, more, parts = ILLEGAL_DRAFTS[name]
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    says(start_error(checkpoint, speculative_config={**DRAFTS, **more}), parts)


def test_drafts_over_data_parallel_ranks(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    error = start_error(checkpoint, speculative_config=DRAFTS, data_parallel_size=2)
    says(error, ("--data-parallel-size=2", "must be 1 with --speculative-config"))


def test_drafts_without_draft_layers(copy: Path) -> None:
    edit_config(copy, text(num_nextn_predict_layers=0))
    says(
        start_error(copy, speculative_config=DRAFTS), ("num_nextn_predict_layers=0", "leave --speculative-config away")
    )


def spoil_tables(directory: Path, keep_rows: int) -> None:
    """Cut every Engram table to its first rows; 0 takes it away, from the index too."""
    index = directory / "model.safetensors.index.json"
    names = json.loads(index.read_text())
    for shard in directory.glob("*.safetensors"):
        tensors = load_file(shard)
        for name in [name for name in tensors if name.endswith("engram.embed.weight")]:
            table = tensors.pop(name)
            if keep_rows:
                tensors[name] = table[:keep_rows].clone()
            else:
                del names["weight_map"][name]
        save_file(tensors, shard, {"format": "pt"})
    index.write_text(json.dumps(names))


def test_missing_table(copy: Path) -> None:
    spoil_tables(copy, keep_rows=0)
    says(start_error(copy), ("layers.1.engram.embed.weight", "is in no shard of", "Restore the file"))


def test_table_of_other_rows_than_the_config_says(copy: Path) -> None:
    spoil_tables(copy, keep_rows=100)
    parts = ("layers.1.engram.embed.weight", "has shape [100, 32]", "engram_num_embeddings", "Use the config")
    says(start_error(copy), parts)


def test_vllm_serve_stops_with_the_same_error(copy: Path) -> None:
    edit, parts = ILLEGAL_CONFIGS["ratio"]
    edit_config(copy, edit)
    done = subprocess.run(
        [vllm_script(), "serve", copy, *SMALL_CPU_FLAGS],
        env={**os.environ, **SMALL_CPU_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode != 0
    assert all(part in done.stderr for part in parts), done.stderr[-3000:]
