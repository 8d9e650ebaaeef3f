"""How the matrices are held that the published format quantises: as published, or widened at load.

`DEEPINFER_VLLM_WEIGHTS`:

| | quantised in the checkpoint | plain in the checkpoint |
|---|---|---|
| packed | codes and scales, widened as they are used | the model's dtype |
| bf16, fp32 | that dtype | that dtype |

Products are taken in the model's dtype; in float32 where the held dtype is wider, and of packed weights on a CPU that
has no bf16 instructions. What the published format leaves plain (embedding, head, norms, router, compressors, index
keys) is not touched by this, nor are Engram's tables, which stay in their file.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.parameter import GroupQuantScaleParameter, ModelWeightParameter

from deepinfer_vllm.models.deepseek_v41 import quantised_shards
from deepinfer_vllm.models.deepseek_v41.quantised_matrix import BLOCK, E2M1, E4M3, QuantisedMatrix, Widener
from deepinfer_vllm.models.deepseek_v41.safetensors_map import stored_tensors
from deepinfer_vllm.native import invariance, invariant
from deepinfer_vllm.native.linear import is_compiled, linear

_CODES = {**dict.fromkeys(quantised_shards.E4M3, E4M3), **dict.fromkeys(quantised_shards.E2M1, E2M1)}
_LAYER = re.compile(r"(layers|mtp)\.\d+\.")
Weight: TypeAlias = torch.Tensor | QuantisedMatrix
"""A matrix [N, K] as it is held."""

_WIDENED = {"bf16": torch.bfloat16, "fp32": torch.float32}


class WeightStorage(QuantizationConfig):
    """Which dtype each weight of one model is held in. Passed to vLLM's linears as their `quant_config`."""

    def __init__(self, model_dtype: torch.dtype, kind: str, directory: Path) -> None:
        """`kind` is the variable's value; `directory` has the shards whose headers say what is quantised."""
        super().__init__()
        self.model_dtype, self.kind = model_dtype, kind
        self._stored = {name: entry["dtype"] for name, entry in stored_tensors(directory).items()}
        self._widener = Widener()

    def held_dtype(self, weight: str, columns: range | None = None) -> torch.dtype:
        """The dtype of a weight, by its name in the checkpoint: E4M3 and E2M1 are codes with a scale beside them.

        What an engine puts before the name is left out. `columns` are those a rank holds, where that is not all: when
        they cut a block that has one scale, the rank holds them in the model's dtype.
        """
        if self.kind != "packed":
            return _WIDENED[self.kind]
        if columns is not None and (columns.start % BLOCK or columns.stop % BLOCK):
            return self.model_dtype
        start = _LAYER.search(weight)
        return _CODES.get(self._stored.get(weight[start.start() if start else 0 :], ""), self.model_dtype)

    def linear(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """x [..., K] times weight [N, K] transposed: [..., N] in x's dtype. Widens a bounded part at a time."""
        if isinstance(weight, torch.Tensor) and weight.dtype == x.dtype:
            return linear(x, weight)
        if invariance.by_rows():
            return self._by_rows(x, weight)
        held = _product_dtype(x) if isinstance(weight, QuantisedMatrix) else weight.dtype
        dtype = torch.promote_types(x.dtype, held)
        rows = x.flatten(0, -2).to(dtype)
        if isinstance(weight, torch.Tensor) and held == dtype:
            out = linear(rows, weight)
        else:
            out = torch.empty(rows.shape[0], weight.shape[0], dtype=dtype, device=x.device)
            for part in self._widener.parts(weight):
                torch.mm(rows, self._widener(rows_of(weight, part)).to(dtype).T, out=out[:, part])
        return out.to(x.dtype).unflatten(0, x.shape[:-1])

    def _by_rows(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """The same in float32, rounded once at the end."""
        if isinstance(weight, torch.Tensor):
            return invariant.linear(x.float(), weight).to(x.dtype)
        rows = x.flatten(0, -2).float()
        out = torch.empty(rows.shape[0], weight.shape[0])
        for part in self._widener.parts(weight):
            out[:, part] = invariant.linear(rows, self._widener(weight.rows(part)))
        return out.to(x.dtype).unflatten(0, x.shape[:-1])

    def grouped_linear(self, x: torch.Tensor, weight: Weight, groups: int) -> torch.Tensor:
        """x [T, groups * K] times each group's own rows of weight [groups * N, K]: [T, groups * N]."""
        rows = weight.shape[0] // groups
        parts = []
        for group, part in enumerate(x.chunk(groups, dim=-1)):
            own = slice(group * rows, (group + 1) * rows)
            parts.append(self.linear(part, rows_of(weight, own)))
        return torch.cat(parts, dim=-1)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase:
        """vLLM's hook: its own method where a weight is held in the model's dtype, ours elsewhere, and where ours reads
        such a weight faster for few tokens."""
        part, whole = getattr(layer, "input_size_per_partition", None), getattr(layer, "input_size", None)
        held = self.held_dtype(f"{prefix}.weight", None if part in (None, whole) else range(part))
        usual = held == self.model_dtype and not is_compiled(held) and not invariance.by_rows()
        return UnquantizedLinearMethod() if usual else StoredLinearMethod(self, held)

    def get_name(self) -> str:
        """vLLM's hook."""
        return "deepseek_v41_weights"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """vLLM's hook."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """vLLM's hook: no CUDA kernel is used."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """vLLM's hook: all is read from the shards."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "WeightStorage":
        """vLLM's hook, for methods chosen by name; this one is made by the model."""
        raise TypeError("the model makes its WeightStorage from the checkpoint's shards")


class StoredLinearMethod(LinearMethodBase):
    """A linear whose weight is held packed, or in another dtype than the model's."""

    def __init__(self, storage: WeightStorage, held: torch.dtype) -> None:
        self.storage, self.held = storage, held

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """vLLM's hook: `weight`, and `scale` where it is packed."""
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        for name, data in packed_or_plain(rows, columns, self.held).items():
            kind = ModelWeightParameter if name == "weight" else GroupQuantScaleParameter
            loader = extra_weight_attrs["weight_loader"]
            layer.register_parameter(name, kind(data=data, input_dim=1, output_dim=0, weight_loader=loader))

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] to [..., N]."""
        out = self.storage.linear(x, held_weight(layer.weight, layer.scale if hasattr(layer, "scale") else None))
        return out if bias is None else out + bias


def _product_dtype(x: torch.Tensor) -> torch.dtype:
    """Of x with a packed weight: float32 where a CPU multiplies that faster than bf16."""
    slow = x.device.type == "cpu" and not torch.cpu._is_avx512_bf16_supported()
    return torch.float32 if slow else x.dtype


def held_weight(weight: torch.Tensor, scale: torch.Tensor | None) -> Weight:
    """Parameters as what `WeightStorage.linear` takes."""
    return weight if scale is None else QuantisedMatrix(weight, scale)


def rows_of(weight: Weight, part: slice) -> Weight:
    """Some rows of a matrix; nothing is copied."""
    return weight.rows(part) if isinstance(weight, QuantisedMatrix) else weight[part]


def columns_of(weight: Weight, part: slice) -> Weight:
    """Columns part.start to part.stop of a matrix; nothing is copied. Raises ValueError where that cuts a block."""
    return weight.columns(part) if isinstance(weight, QuantisedMatrix) else weight[:, part]


def put(tensor: Weight, target: Weight, take: Callable[[Weight], Weight] = lambda weight: weight) -> None:
    """Copy what is taken of a checkpoint's matrix, widened where the target is plain.

    Raises ValueError where it does not fit.
    """
    if isinstance(target, torch.Tensor) and isinstance(tensor, QuantisedMatrix):
        tensor = tensor.widen(target.dtype)
    tensor = take(tensor)
    if tensor.shape != target.shape:  # copy_ would broadcast
        raise ValueError(f"{list(tensor.shape)} into {list(target.shape)}")
    if isinstance(target, torch.Tensor):
        target.copy_(tensor)
        return
    check_kind(tensor, target.codes.dtype)
    target.codes.copy_(tensor.codes)
    target.scale.copy_(tensor.scale)


def check_kind(tensor: Weight, codes: torch.dtype) -> None:
    """Raises ValueError for what cannot be held in these codes."""
    found = tensor.codes.dtype if isinstance(tensor, QuantisedMatrix) else tensor.dtype
    if found != codes or isinstance(tensor, torch.Tensor):
        raise ValueError(f"{found} where {codes} with a scale is held")


def packed_or_plain(rows: int, columns: int, held: torch.dtype, *stack: int) -> dict[str, torch.Tensor]:
    """Room for a matrix [rows, columns], or a stack of them: `weight`, and `scale` where `held` means codes."""
    if held not in (E4M3, E2M1):
        return {"weight": torch.empty(*stack, rows, columns, dtype=held)}
    a_byte = 1 if held == E4M3 else 2
    return {
        "weight": torch.empty(*stack, rows, columns // a_byte, dtype=held),
        "scale": torch.empty(*stack, rows, -(-columns // BLOCK), dtype=torch.uint8),
    }
