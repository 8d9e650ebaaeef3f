"""C that the system's compiler builds when first asked for, kept in the user's cache.

No C is needed: whoever calls this has slower code that does the same, and takes it on any of the errors named here.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

TIMEOUT_SECONDS = 60
ERRORS = (OSError, RuntimeError, subprocess.SubprocessError)
"""What building and loading raise: no compiler, no room, not a library, no home (RuntimeError), too slow."""


def allowed() -> bool:
    """Whether the user wants compiled code: `DEEPINFER_VLLM_NATIVE` is not 0."""
    return os.environ.get("DEEPINFER_VLLM_NATIVE") != "0"


def compiler() -> str:
    """The C compiler: `CC`, cc, gcc or clang. Raises FileNotFoundError."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (path := shutil.which(name)):
            return path
    raise FileNotFoundError("no C compiler (CC, cc, gcc, clang) on the path")


def cache_directory(name: str) -> Path:
    """The user's cache of `name`: below `XDG_CACHE_HOME`, or ~/.cache. Raises RuntimeError where there is no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / name


def build(source: Path, flags: Sequence[str], libraries: Sequence[str], cache: Path, cc: str) -> Path:
    """The library of `source` in `cache`, compiled if it is not there yet. Raises OSError, SubprocessError.

    Its name is made from source, flags and architecture: what is there is never out of date.
    """
    key = hashlib.sha256("\0".join((source.read_text(), *flags, *libraries, platform.machine())).encode()).hexdigest()
    library = cache / f"{source.stem}-{key[:16]}.so"
    if library.is_file():
        return library
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        compiled, built = Path(scratch) / f"{source.stem}.o", Path(scratch) / library.name
        _run(cc, *flags, "-c", str(source), "-o", str(compiled))
        _run(cc, "-shared", str(compiled), "-o", str(built), *libraries)
        os.replace(built, library)  # whole or not at all, whoever builds at the same time
    return library


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    if done.returncode:
        lines = done.stderr.splitlines() or [f"exit status {done.returncode}"]
        raise OSError(f"{command[0]} failed: {next((line for line in lines if 'error' in line), lines[-1])}")
