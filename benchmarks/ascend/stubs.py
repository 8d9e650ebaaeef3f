"""Empty libraries in the place of CANN's, so that torch_npu can be imported and asked what it registers.

Every function of them is two instructions that return 0: good for looking at schemas, and for nothing else.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

RETURN_0 = {"x86_64": "xorl %eax, %eax\n\tret", "aarch64": "mov x0, #0\n\tret"}
TOOLS = ("cc", "ldd", "nm", "readelf")


class NoStubs(Exception):
    """They cannot be made here; the message says why, in one line."""


def make_stubs(libraries: list[Path], search: list[Path], out: Path) -> dict[str, int]:
    """Write into `out` the libraries that `libraries` need and that are neither on this machine nor in `search`.

    The first of them, by name, has every symbol that is missing. Returns their names with the number of symbols.
    Raises NoStubs.
    """
    machine = platform.machine()
    if machine not in RETURN_0:
        raise NoStubs(f"a {machine}: stub libraries are written for {' and '.join(RETURN_0)}")
    if absent := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise NoStubs(f"{' and '.join(absent)} not found: install a C compiler and binutils")
    paths = os.pathsep.join(map(str, search))
    found: set[Path] = set()
    missing: set[str] = set()
    python = Path(os.path.realpath(sys.executable))  # which may have its C functions itself
    for library in (*libraries, python):
        listed = _run("ldd", str(library), LD_LIBRARY_PATH=paths)
        missing.update(re.findall(r"^\s*(\S+) => not found$", listed, re.MULTILINE))
        found.update(Path(path) for path in re.findall(r"(/\S+) \(0x", listed))
    there = {name for library in {*libraries, *found, python} for name in symbols(library, defined=True)}
    wanted = sorted({name for library in libraries for name in symbols(library, defined=False)} - there)
    if wanted and not missing:
        raise NoStubs(
            f"{len(wanted)} symbols are missing, {wanted[0]} first, but no library: another torch than it wants?"
        )
    out.mkdir(parents=True, exist_ok=True)
    counts = dict.fromkeys(sorted(missing), 0)
    for number, name in enumerate(counts):
        source = out / f"{name}.s"
        held = wanted if number == 0 else []
        source.write_text("".join(f"\t.globl {s}\n\t.type {s}, @function\n{s}:\n\t{RETURN_0[machine]}\n" for s in held))
        _run("cc", "-shared", "-nostdlib", f"-Wl,-soname,{name}", "-o", str(out / name), str(source))
        counts[name] = len(held)
    return counts


def symbols(library: Path, *, defined: bool) -> set[str]:
    """Names that a library offers to others, or must find in others."""
    listed = _run("nm", "--dynamic", f"--{'' if defined else 'un'}defined-only", str(library))
    kinds = None if defined else {"U"}  # weak ones may stay missing
    rows = (line.split() for line in listed.splitlines())
    names = (row[-1] for row in rows if len(row) >= 2 and (kinds is None or row[-2] in kinds))
    return {name.split("@")[0] for name in names if defined or "@" not in name}


def _run(*command: str, **environment: str) -> str:
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    if done.returncode and command[0] != "ldd":
        raise NoStubs(
            f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'failed'}"
        )
    return done.stdout
