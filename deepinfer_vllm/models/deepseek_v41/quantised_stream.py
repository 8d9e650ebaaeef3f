"""A checkpoint's tensors as they are read, each quantised weight joined with its scale."""

from collections.abc import Iterable, Iterator

import torch

from deepinfer_vllm.models.deepseek_v41.quantised_matrix import QuantisedMatrix

_QUANTISED = (torch.float8_e4m3fn, torch.int8, torch.uint8)


def joined(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor | QuantisedMatrix | str]]:
    """Pass plain tensors through; join `X.weight` and `X.scale`, whichever comes first, under the weight's name.

    A pair that cannot be joined is passed on as what is wrong with it. What stays alone is passed on at the end: a
    scale by its name, a weight as `<name> (without its scale)`.
    """
    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        stem, _, kind = name.rpartition(".")
        if kind not in ("weight", "scale") or (kind == "weight" and tensor.dtype not in _QUANTISED):
            yield name, tensor
            continue
        other = waiting.pop(f"{stem}.{'scale' if kind == 'weight' else 'weight'}", None)
        if other is None:
            waiting[name] = tensor
            continue
        weight, scale = (tensor, other) if kind == "weight" else (other, tensor)
        try:
            yield f"{stem}.weight", QuantisedMatrix.published(weight, scale)
        except (RuntimeError, ValueError) as error:
            yield f"{stem}.weight", str(error)
    for name, tensor in waiting.items():
        yield name if name.endswith(".scale") else f"{name} (without its scale)", tensor
