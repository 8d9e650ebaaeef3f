"""Arrays over memory that vLLM names by its address."""

import ctypes
import functools

import numpy as np
from numpy.typing import NDArray


@functools.lru_cache(maxsize=1024)
def int32_table(address: int, rows: int, columns: int) -> NDArray[np.int32]:
    """The int32 table [rows, columns] at an address, writable. It does not keep the memory alive: use it at once."""
    memory = (ctypes.c_int32 * (rows * columns)).from_address(address)
    return np.frombuffer(memory, dtype=np.int32).reshape(rows, columns)
