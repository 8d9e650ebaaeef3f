"""How linears and experts are held: the dtypes chosen, equal values whatever the choice, and a rank's part of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)

from deepinfer_vllm.models.deepseek_v41 import weight_storage
from deepinfer_vllm.models.deepseek_v41.attention import GroupedLinear
from deepinfer_vllm.models.deepseek_v41.expert_shard import ExpertShard
from deepinfer_vllm.models.deepseek_v41.experts import Experts
from deepinfer_vllm.models.deepseek_v41.quantised_matrix import E2M1, E4M3, QuantisedMatrix, Widener
from deepinfer_vllm.models.deepseek_v41.weight_storage import StoredLinearMethod, WeightStorage, check_kind, put
from reference.dequantise import dequantise
from small_model import both_configs, generator

pytestmark = pytest.mark.usefixtures("vllm_layers")

KINDS = ["packed", "bf16", "fp32"]
WIDE = (96, 64)
WIDER = {"moe_intermediate_size": 64}
LINEAR, GROUPED, EXPERTS, PLAIN = (
    "layers.0.attn.wq_b",
    "layers.0.attn.wo_a",
    "layers.0.ffn.experts",
    "layers.1.attn.wkv",
)
Tensors = dict[str, torch.Tensor]


def e4m3(seed: int, rows: int, columns: int) -> Tensors:
    codes = torch.randint(-8, 9, (rows, columns), generator=generator(seed)).float().to(E4M3)
    scale = torch.randint(126, 129, (-(-rows // 32), -(-columns // 32)), generator=generator(seed))
    return {"weight": codes, "scale": scale.to(torch.uint8).view(torch.float8_e8m0fnu)}


def e2m1(seed: int, rows: int, columns: int) -> Tensors:
    codes = torch.randint(0, 256, (rows, columns // 2), generator=generator(seed)).to(torch.uint8).view(torch.int8)
    scale = torch.randint(126, 129, (rows, -(-columns // 32)), generator=generator(seed))
    return {"weight": codes, "scale": scale.to(torch.uint8).view(torch.float8_e8m0fnu)}


def named(prefix: str, tensors: Tensors) -> Tensors:
    return {f"{prefix}.{name}": t for name, t in tensors.items()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors, Tensors]:
    """(directory, its tensors, their values): every kind of matrix that is held packed, and a plain one.

    Values are small multiples of a power of two, so that products with integers are exact in any order of summation.
    """
    config, _ = both_configs(**WIDER)
    inner, hidden = config.moe_intermediate_size, config.hidden_size
    tensors = named(LINEAR, e4m3(1, *WIDE)) | named(GROUPED, e4m3(2, 64, 32))
    tensors[f"{PLAIN}.weight"] = torch.randint(-8, 9, WIDE, generator=generator(3)).bfloat16()
    for e in range(config.num_experts):
        for name, (rows, columns) in {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}.items():
            tensors |= named(f"{EXPERTS}.{e}.{name}", e2m1(10 * e + len(name), rows, columns))
    directory = tmp_path_factory.mktemp("stored")
    save_file(tensors, directory / "model.safetensors")
    return directory, tensors, dequantise(tensors)


def make_experts(
    storage: WeightStorage | None,
    dtype: torch.dtype = torch.float32,
    rank: int = 0,
    ranks: int = 1,
    by_expert: bool = False,
) -> Experts:
    config, _ = both_configs(**WIDER)
    shard = ExpertShard.plan(config, rank, ranks, by_expert=by_expert)
    return Experts(config, dtype, shard, storage=storage, prefix=EXPERTS)


def storage(checkpoint: tuple[Path, Tensors, Tensors], kind: str, dtype: torch.dtype = torch.float32) -> WeightStorage:
    return WeightStorage(dtype, kind, checkpoint[0])


def published(checkpoint: tuple[Path, Tensors, Tensors], name: str) -> QuantisedMatrix:
    return QuantisedMatrix.published(checkpoint[1][f"{name}.weight"], checkpoint[1][f"{name}.scale"])


def integers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-4, 5, shape, generator=generator(seed)).float()


def load(layer: nn.Module, matrix: QuantisedMatrix) -> None:
    """As weights.load does."""
    if hasattr(layer, "scale"):
        layer.weight.weight_loader(layer.weight, matrix.codes)
        layer.scale.weight_loader(layer.scale, matrix.scale)
    else:
        layer.weight.weight_loader(layer.weight, matrix.widen(layer.weight.dtype))
    layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize(
    ("kind", "dtype", "quantised", "experts", "plain"),
    [
        ("packed", torch.float32, E4M3, E2M1, torch.float32),
        ("packed", torch.bfloat16, E4M3, E2M1, torch.bfloat16),
        ("bf16", torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16),
        ("fp32", torch.bfloat16, torch.float32, torch.float32, torch.float32),
    ],
)
def test_which_dtype_is_held(
    checkpoint: Any,
    kind: str,
    dtype: torch.dtype,
    quantised: torch.dtype,
    experts: torch.dtype,
    plain: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = storage(checkpoint, kind, dtype)
    for before in ("", "model.", "draft.model."):
        assert chosen.held_dtype(f"{before}{LINEAR}.weight") == quantised
        assert chosen.held_dtype(f"{before}{EXPERTS}.0.w1.weight") == experts
        assert chosen.held_dtype(f"{before}{PLAIN}.weight") == plain
    for compiled in (True, False):  # our own products of few rows, which take a plain weight in float32
        monkeypatch.setattr(weight_storage, "is_compiled", lambda held, on=compiled: on and held == torch.float32)
        vllms = isinstance(chosen.get_quant_method(nn.Module(), PLAIN), UnquantizedLinearMethod)
        assert vllms == (plain == dtype and not (compiled and dtype == torch.float32))
    assert isinstance(chosen.get_quant_method(nn.Module(), LINEAR), StoredLinearMethod)


def test_packed_means_nothing_to_what_is_not_there(tmp_path: Path) -> None:
    """A checkpoint without shards, as --load-format dummy has it."""
    assert WeightStorage(torch.bfloat16, "packed", tmp_path).held_dtype(f"{LINEAR}.weight") == torch.bfloat16


@pytest.mark.parametrize("has_bf16", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_linear_gives_the_same_however_it_is_held(
    checkpoint: Any, kind: str, dtype: torch.dtype, has_bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few rows at a time too, for more dimensions than two, and on a CPU with and without bf16 instructions."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    chosen = storage(checkpoint, kind, dtype)
    chosen._widener = Widener(5 * WIDE[1])
    layer = ReplicatedLinear(
        WIDE[1], WIDE[0], bias=False, return_bias=False, quant_config=chosen, params_dtype=dtype, prefix=LINEAR
    )
    load(layer, published(checkpoint, LINEAR))
    for shape in ((1,), (7,), (2, 3), (0,)):
        x = integers(4, *shape, WIDE[1]).to(dtype)
        right = x.double() @ checkpoint[2][f"{LINEAR}.weight"].double().T
        got = layer(x)
        assert got.dtype == dtype and torch.equal(got, right.to(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_is_added(checkpoint: Any, kind: str) -> None:
    layer = ReplicatedLinear(WIDE[1], WIDE[0], return_bias=False, quant_config=storage(checkpoint, kind), prefix=LINEAR)
    load(layer, published(checkpoint, LINEAR))
    layer.bias.data.copy_(integers(6, WIDE[0]))
    x = integers(5, 3, WIDE[1])
    assert torch.equal(layer(x), x @ checkpoint[2][f"{LINEAR}.weight"].T + layer.bias)


@pytest.mark.parametrize("kind", KINDS)
def test_groups(checkpoint: Any, kind: str) -> None:
    values = checkpoint[2][f"{GROUPED}.weight"]
    layer = GroupedLinear(2, 32, 32, torch.float32, storage=storage(checkpoint, kind), prefix=GROUPED)
    if kind == "packed":
        put(published(checkpoint, GROUPED), QuantisedMatrix(layer.weight, layer.scale))
    else:
        put(published(checkpoint, GROUPED), layer.weight)
    x = integers(7, 5, 64)
    assert torch.equal(layer(x), torch.cat((x[:, :32] @ values[:32].T, x[:, 32:] @ values[32:].T), dim=-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_experts(checkpoint: Any, kind: str, dtype: torch.dtype) -> None:
    """Their weights bit for bit, and what they answer against experts held plain in the model's dtype."""
    config, _ = both_configs(**WIDER)
    held, plain = make_experts(storage(checkpoint, kind, dtype), dtype), make_experts(None, dtype)
    for e in range(config.num_experts):
        for name in ("w1", "w2", "w3"):
            matrix = published(checkpoint, f"{EXPERTS}.{e}.{name}")
            held.load(e, name, matrix)
            plain.load(e, name, matrix)
        for name in ("w13", "w2"):
            mine, other = held.held(name, e), plain.held(name, e)
            assert torch.equal(mine.widen(dtype) if isinstance(mine, QuantisedMatrix) else mine.to(dtype), other)
    chosen = torch.randint(config.num_experts, (9, 2), generator=generator(1))
    x, weights = integers(2, 9, config.hidden_size).to(dtype), torch.rand(9, 2, generator=generator(3))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(held(x, chosen, weights), plain(x, chosen, weights), rtol=tolerance, atol=tolerance)


def test_what_packed_experts_take_in_memory(checkpoint: Any) -> None:
    config, _ = both_configs(**WIDER)
    sizes = {kind: sum(p.nbytes for p in make_experts(storage(checkpoint, kind)).parameters()) for kind in KINDS}
    values = config.num_experts * 3 * config.moe_intermediate_size * config.hidden_size
    assert sizes == {"packed": values // 2 + values // 32, "bf16": 2 * values, "fp32": 4 * values}


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(64, 32), "torch.float32 where torch.uint8 with a scale is held"),
        (QuantisedMatrix(torch.zeros(64, 32).to(E4M3), torch.zeros(64, 1)), "float8_e4m3fn where torch.uint8"),
        (QuantisedMatrix(torch.zeros(15, 16, dtype=torch.uint8), torch.zeros(15, 1)), r"\[15, 32\] into \[64, 32\]"),
    ],
)
def test_what_packed_experts_do_not_take(checkpoint: Any, tensor: Any, message: str) -> None:
    experts = make_experts(storage(checkpoint, "packed"))
    with pytest.raises(ValueError, match=message):
        experts.load(0, "w1", tensor)
    with pytest.raises(ValueError, match="uint8 where torch.float8_e4m3fn"):
        check_kind(torch.zeros(1, dtype=torch.uint8), E4M3)


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """two_ranks(r): what vLLM's linears ask for, without a second process."""

    def set_rank(rank: int) -> None:
        for module in ("layers.linear", "parameter"):
            where = f"vllm.model_executor.{module}.get_tensor_model_parallel"
            monkeypatch.setattr(f"{where}_rank", lambda: rank)
            monkeypatch.setattr(f"{where}_world_size", lambda: 2)

    return set_rank


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_hold_half_each(checkpoint: Any, kind: str, two_ranks: Callable[[int], None]) -> None:
    """Rows that are no multiple of a block, and whole blocks of columns."""
    x, values = integers(8, 3, WIDE[1]), checkpoint[2][f"{LINEAR}.weight"]
    columns, rows = [], []
    for rank in range(2):
        two_ranks(rank)
        chosen = storage(checkpoint, kind)
        column = ColumnParallelLinear(
            WIDE[1], WIDE[0], bias=False, return_bias=False, quant_config=chosen, prefix=LINEAR
        )
        row = RowParallelLinear(
            *reversed(WIDE), bias=False, reduce_results=False, return_bias=False, quant_config=chosen, prefix=LINEAR
        )
        assert column.weight.shape[0] == 48 and row.weight.shape[1] == 32
        load(column, published(checkpoint, LINEAR))
        load(row, published(checkpoint, LINEAR))
        columns.append(column(x))
        rows.append(row(x[:, 32 * rank : 32 * rank + 32]))
    assert torch.equal(torch.cat(columns, dim=-1), x @ values.T)
    assert torch.equal(rows[0] + rows[1], x @ values.T)


@pytest.mark.parametrize(("ranks", "by_expert"), [(2, False), (2, True), (4, False)])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_hold_their_experts(checkpoint: Any, kind: str, ranks: int, by_expert: bool) -> None:
    """A slice of each one's inner width, or some of them whole: the parts are those of all. A quarter cuts blocks."""
    plain = make_experts(None)
    for rank in range(ranks):
        part = make_experts(storage(checkpoint, kind), rank=rank, ranks=ranks, by_expert=by_expert)
        assert hasattr(part, "w13_scale") == (kind == "packed")
        assert hasattr(part, "w2_scale") == (kind == "packed" and ranks == 2)
        inner = slice(part.shard.inner.start, part.shard.inner.stop)
        for place, e in enumerate(part.shard.experts):
            for name in ("w1", "w2", "w3"):
                matrix = published(checkpoint, f"{EXPERTS}.{e}.{name}")
                part.load(e, name, matrix)
                plain.load(e, name, matrix)
            gate_up = plain.w13[e].unflatten(0, (2, -1))[:, inner].flatten(0, 1)
            for name, whole in (("w13", gate_up), ("w2", plain.w2[e][:, inner])):
                held = part.held(name, place)
                assert torch.equal(held.widen() if isinstance(held, QuantisedMatrix) else held.float(), whole)


def test_a_rank_that_would_cut_a_block_holds_it_widened(checkpoint: Any, two_ranks: Callable[[int], None]) -> None:
    values, x = checkpoint[2][f"{GROUPED}.weight"], integers(9, 2, 32)
    parts = []
    for rank in range(2):
        two_ranks(rank)
        layer = RowParallelLinear(
            32,
            64,
            bias=False,
            reduce_results=False,
            return_bias=False,
            quant_config=storage(checkpoint, "packed"),
            prefix=GROUPED,
        )
        assert layer.weight.dtype == torch.float32 and not hasattr(layer, "scale")
        load(layer, published(checkpoint, GROUPED))
        parts.append(layer(x[:, 16 * rank : 16 * rank + 16]))
    assert torch.equal(parts[0] + parts[1], x @ values.T)


def test_the_workspace_is_bounded(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large a matrix, no more of it is widened at once than the workspace holds."""
    widened: list[int] = []

    class Counting(Widener):
        def __call__(self, matrix: Any) -> torch.Tensor:
            values = super().__call__(matrix)
            widened.append(values.numel())
            return values

    chosen = storage(checkpoint, "packed")
    chosen._widener = Counting(1000)
    chosen.linear(integers(1, 2, 64), published(checkpoint, LINEAR))
    assert max(widened) <= 1000 and sum(widened) == WIDE[0] * WIDE[1]
    assert weight_storage.Widener()._size == 1 << 20
