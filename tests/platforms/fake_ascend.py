"""A made-up Ascend stack: packages with the metadata that vLLM reads, and a platform class that needs no NPU."""

from pathlib import Path

from fake_site import FakeSite

OURS = (
    "[vllm.platform_plugins]\ndeepinfer_ascend = deepinfer_vllm.platforms:ascend_platform\n"
    "[vllm.general_plugins]\ndeepinfer_vllm = deepinfer_vllm:register\n"
)
THEIRS = "[vllm.platform_plugins]\nascend = vllm_ascend:register\n"
PLATFORM = """\
from vllm.platforms import Platform, PlatformEnum


class NPUPlatform(Platform):
    _enum = PlatformEnum.OOT
    device_name = device_type = "npu"
    dispatch_key = "PrivateUse1"
"""


def install_ours(site: FakeSite) -> None:
    """Metadata that name our plugin. They go before those of the installed package, if the site does."""
    site.install("deepinfer-vllm", "0.1.0", points=OURS)


def install_vllm_ascend(site: FakeSite, version: str = "0.32.0", device: str = "A5", points: str = THEIRS) -> Path:
    """A stand-in for vllm-ascend, whose plugin answers on every machine; the path of its metadata."""
    files = {
        "vllm_ascend/__init__.py": "def register():\n    return 'vllm_ascend.platform.NPUPlatform'\n",
        "vllm_ascend/platform.py": PLATFORM,
        "vllm_ascend/_build_info.py": f"__device_type__ = '{device}'\n",
    }
    return site.install("vllm-ascend", version, files, points=points)


def install_torch_npu(site: FakeSite, version: str = "2.13.0", cann: bool = False) -> Path:
    """A torch-npu as it is without CANN, or with; the path of its metadata."""
    broken = "raise ImportError('libhccl.so: cannot open shared object file')\n"
    return site.install("torch-npu", version, {"torch_npu/__init__.py": "" if cann else broken})


def make_machine(root: Path, *files: str) -> Path:
    """A file system with empty `files`; `root`."""
    root.mkdir(parents=True, exist_ok=True)
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


DEVICE, CANN = "dev/davinci0", "usr/lib/libhccl.so"
