"""The compiled kernels: built by the system's C compiler when first asked for, kept in the user's cache, or None.

Nothing of torch is compiled against, so this takes a fraction of a second. Wider instructions are chosen when it runs,
so a cache on a shared disk serves every machine of an architecture. OpenMP's functions are left for the loader to find
in the library that torch has brought: two sets of threads would wait for each other.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

from deepinfer_kvstore import native
from deepinfer_vllm import envs

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fopenmp")
ARGUMENTS: dict[str, list[type]] = {
    "sinkhorn": [*[ctypes.c_void_p] * 2, *[ctypes.c_long] * 3, ctypes.c_float],
    "few_rows": [*[ctypes.c_void_p] * 3, *[ctypes.c_long] * 3],
}
"""By function of the source. An array is the address of its first element."""

logger = logging.getLogger("vllm.deepinfer")  # vLLM shows its own loggers only


@functools.cache
def kernels() -> ctypes.CDLL | None:
    """The library, the same for the life of the process. None when it is switched off or cannot be built, which is
    logged once."""
    return load(SOURCE, FLAGS, ARGUMENTS)


def load(source: Path, flags: tuple[str, ...], arguments: dict[str, list[type]]) -> ctypes.CDLL | None:
    """A library of ours, with the arguments of its functions declared. None as `kernels` has it."""
    if not envs.DEEPINFER_VLLM_NATIVE:
        return None
    import torch  # noqa: F401  # with it comes OpenMP

    try:
        library = ctypes.CDLL(str(build(native.cache_directory("deepinfer_vllm"), native.compiler(), source, flags)))
    except native.ERRORS as error:
        logger.info("No compiled kernels, PyTorch does their work: %s", error)
        return None
    for name, types in arguments.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    return library


def build(cache: Path, cc: str, source: Path = SOURCE, flags: tuple[str, ...] = FLAGS) -> Path:
    """The library in `cache`, compiled if this source is not there yet. Raises OSError, SubprocessError."""
    return native.build(source, flags, ("-lm",), cache, cc)
