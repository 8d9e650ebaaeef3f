"""The compiled kernels: built by the system's C compiler when first asked for, kept in the user's cache, or None.

Nothing of torch is compiled against, so this takes a fraction of a second. Wider instructions are chosen when it runs,
so a cache on a shared disk serves every machine of an architecture. OpenMP's functions are left for the loader to find
in the library that torch has brought: two sets of threads would wait for each other.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from deepinfer_vllm import envs

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fopenmp", "-c")
TIMEOUT_SECONDS = 60
ARGUMENTS = {
    "sinkhorn": [*[ctypes.c_void_p] * 2, *[ctypes.c_long] * 3, ctypes.c_float],
    "few_rows": [*[ctypes.c_void_p] * 3, *[ctypes.c_long] * 3],
}
"""By function of the source. An array is the address of its first element."""

logger = logging.getLogger("vllm.deepinfer")  # vLLM shows its own loggers only


@functools.cache
def kernels() -> ctypes.CDLL | None:
    """The library, the same for the life of the process. None when it is switched off or cannot be built, which is
    logged once."""
    if not envs.DEEPINFER_VLLM_NATIVE:
        return None
    import torch  # noqa: F401  # with it comes OpenMP

    try:
        library = ctypes.CDLL(str(build(_cache_directory(), compiler())))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: there is no home
        logger.info("No compiled kernels, PyTorch does their work: %s", error)
        return None
    for name, types in ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    return library


def compiler() -> str:
    """The C compiler: `CC`, cc, gcc or clang. Raises FileNotFoundError."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (path := shutil.which(name)):
            return path
    raise FileNotFoundError("no C compiler (CC, cc, gcc, clang) on the path")


def build(cache: Path, cc: str) -> Path:
    """The library in `cache`, compiled if this source is not there yet. Raises OSError, SubprocessError."""
    key = hashlib.sha256("\0".join((SOURCE.read_text(), *FLAGS, platform.machine())).encode()).hexdigest()
    library = cache / f"kernels-{key[:16]}.so"
    if library.is_file():
        return library
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        compiled, built = Path(scratch) / "kernels.o", Path(scratch) / library.name
        _run(cc, *FLAGS, str(SOURCE), "-o", str(compiled))
        _run(cc, "-shared", str(compiled), "-o", str(built), "-lm")
        os.replace(built, library)  # whole or not at all, whoever builds at the same time
    return library


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    if done.returncode:
        lines = done.stderr.splitlines() or [f"exit status {done.returncode}"]
        raise OSError(f"{command[0]} failed: {next((line for line in lines if 'error' in line), lines[-1])}")


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepinfer_vllm"
