"""Staged writes: many short runs of values, each to its place in one of several tables."""

import ctypes

import torch


def apply_write(
    output_ptr: torch.Tensor,
    output_stride: "torch.Tensor | int",
    write_indices_ptr: torch.Tensor,
    write_starts_ptr: torch.Tensor,
    write_contents_ptr: torch.Tensor,
    write_cu_lens_ptr: torch.Tensor,
    write_group_ids_ptr: torch.Tensor | None,
    BLOCK_SIZE: int,
    MULTI_GROUP: bool,
) -> None:
    """Copy run i, contents[cu_lens[i - 1] : cu_lens[i]], to row indices[i] from column starts[i] on.

    The table is `output_ptr` itself, or with MULTI_GROUP the int32 table whose address stands at the run's group.
    """
    rows, starts, ends = write_indices_ptr.tolist(), write_starts_ptr.tolist(), write_cu_lens_ptr.tolist()
    if MULTI_GROUP:
        assert write_group_ids_ptr is not None and isinstance(output_stride, torch.Tensor)
        addresses, strides = output_ptr.tolist(), output_stride.tolist()
        groups = write_group_ids_ptr.tolist()
    else:
        addresses, strides, groups = [output_ptr.data_ptr()], [output_stride], [0] * len(rows)
    size, source, begin = write_contents_ptr.element_size(), write_contents_ptr.data_ptr(), 0
    for group, row, start, end in zip(groups, rows, starts, ends, strict=True):
        target = addresses[group] + (row * strides[group] + start) * size
        ctypes.memmove(target, source + begin * size, (end - begin) * size)
        begin = end
