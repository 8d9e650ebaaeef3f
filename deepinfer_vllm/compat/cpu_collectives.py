"""The two collectives over unequal parts that data-parallel experts need and vLLM's CPU communicator lacks."""

import functools
from typing import Any


def add_cpu_collectives() -> None:
    """Give vLLM's CPU communicator all_gatherv and reduce_scatterv, unless it has its own."""
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    for name, function in (("all_gatherv", _all_gatherv), ("reduce_scatterv", _reduce_scatterv)):
        if getattr(CpuCommunicator, name) is getattr(DeviceCommunicatorBase, name):  # which raises NotImplementedError
            setattr(CpuCommunicator, name, function)


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Every rank's rows [sizes[rank], ...] as one tensor, in rank order; a list of tensors gives a list."""
    import torch

    if isinstance(input_, list | tuple):
        return [_all_gatherv(self, tensor, dim, sizes) for tensor in input_]
    sizes = _checked(self, dim, sizes or [len(input_)] * self.world_size)
    if len(input_) != sizes[self.rank_in_group]:
        raise ValueError(f"rank {self.rank_in_group} brings {len(input_)} rows to a gather of {sizes}")
    padded = input_.new_zeros((max(sizes), *input_.shape[1:]))  # gloo gathers equal parts only
    padded[: len(input_)] = input_
    parts = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _reduce_scatterv(self: Any, input_: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
    """This rank's rows [sizes[rank], ...] of the sum of every rank's [sum(sizes), ...]."""
    import torch

    sizes = _checked(self, dim % input_.dim(), sizes or [len(input_) // self.world_size] * self.world_size)
    if len(input_) != sum(sizes):
        raise ValueError(f"{len(input_)} rows cannot be scattered as {sizes}")
    own = sizes[self.rank_in_group]
    parts = input_.new_empty((self.world_size * own, *input_.shape[1:]))
    torch.distributed.all_to_all_single(
        parts, input_.contiguous(), [own] * self.world_size, sizes, group=self.device_group
    )
    return functools.reduce(torch.add, parts.unflatten(0, (self.world_size, own)).unbind())  # in rank order


def _checked(communicator: Any, dim: int, sizes: list[int]) -> list[int]:
    if dim != 0 or len(sizes) != communicator.world_size:
        raise ValueError(
            f"dimension {dim}, {len(sizes)} sizes: must be 0, and one for each of {communicator.world_size}"
        )
    return sizes
