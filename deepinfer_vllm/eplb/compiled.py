"""numba's compiler, for loops over slots that numpy has no words for."""

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(function: Callable[..., Any]) -> Any:
    """Machine code of `function` at its first call, kept on disk where there is a place that can be written."""
    try:
        return njit(cache=True)(function)
    except RuntimeError:  # neither beside the source nor in the user's cache
        return njit(function)
