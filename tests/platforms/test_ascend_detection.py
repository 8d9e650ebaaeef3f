"""What is found of an Ascend stack by files and metadata, and what follows from it."""

from pathlib import Path

import pytest

from deepinfer_vllm.platforms.activation import Activation, Route, decide
from deepinfer_vllm.platforms.detection import AscendStack, find_stack, npu_nodes
from fake_site import FakeSite

COMPLETE = AscendStack(
    vllm_ascend=("0.32.0",), torch_npu=("2.13.0",), nodes=("/dev/davinci0",), driver=True, cann=True, built_for="A5"
)


def touch(root: Path, *names: str) -> None:
    for name in names:
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def test_nodes_are_devices_and_functions_of_the_unified_bus(tmp_path: Path) -> None:
    assert npu_nodes(tmp_path) == ()
    touch(tmp_path, "dev/davinci_manager", "dev/davinci1", "dev/davinci0", "dev/davincix", "dev/nvidia0")
    assert npu_nodes(tmp_path) == ("/dev/davinci0", "/dev/davinci1")
    for device, count in (("udma0", "0\n"), ("udma1", "0x2\n"), ("udma2", "none\n")):
        file = f"sys/class/ubcore/{device}/device/ub_totalues"
        touch(tmp_path, file)
        (tmp_path / file).write_text(count)
    assert npu_nodes(tmp_path)[2:] == ("/sys/class/ubcore/udma1/device/ub_totalues",)


def test_an_empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert find_stack([str(tmp_path)], tmp_path) == AscendStack()


def test_packages_are_read_and_not_imported(site: FakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    dies = "raise SystemExit('imported')\n"
    build_info = "# Auto-generated\n__device_type__ = 'A5'\n"
    site.install(
        "vllm-ascend", "0.23.0.post1", {"vllm_ascend/__init__.py": dies, "vllm_ascend/_build_info.py": build_info}
    )
    site.install("torch-npu", "2.10.0", {"torch_npu/__init__.py": dies})
    site.install_vllm_cpu()
    touch(tmp_path, "dev/davinci_manager", "usr/local/Ascend/cann-9.2.0/set_env.sh")
    assert find_stack([str(site.path)], tmp_path) == AscendStack(
        vllm_ascend=("0.23.0.post1",),
        torch_npu=("2.10.0",),
        vllm="0.32.0",
        torch="2.13.0+cpu",
        built_for="A5",
        driver=True,
        cann_setup="/usr/local/Ascend/cann-9.2.0/set_env.sh",
    )


def test_metadata_without_a_package_is_not_an_installation(site: FakeSite, tmp_path: Path) -> None:
    site.install("vllm-ascend", "0.23.0")
    site.install("torch-npu", "2.10.0", {"torch_npu/readme": ""})  # what an interrupted uninstall leaves
    found = find_stack([str(site.path)], tmp_path)
    assert (found.vllm_ascend, found.torch_npu) == ((), ())


def test_every_copy_counts_once(tmp_path: Path) -> None:
    first, second = FakeSite(tmp_path / "first"), FakeSite(tmp_path / "second")
    for site, version in ((first, "0.32.0"), (second, "0.23.0")):
        site.install("vllm-ascend", version, {"vllm_ascend/__init__.py": ""})
    paths = [str(first.path), str(second.path), str(first.path)]
    assert find_stack(paths, tmp_path).vllm_ascend == ("0.32.0", "0.23.0")


@pytest.mark.parametrize("where", ["LD_LIBRARY_PATH", "etc/ld.so.conf.d/ascend.conf", "usr/lib64"])
def test_cann_is_where_the_loader_looks(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", ":/nowhere")
    directory = "usr/lib64" if where == "usr/lib64" else "usr/local/Ascend/cann/lib64"
    touch(tmp_path, f"{directory}/libhccl.so")
    if where == "LD_LIBRARY_PATH":
        assert not find_stack([], tmp_path).cann
        monkeypatch.setenv(where, f"/nowhere:{tmp_path / directory}")
    elif where.endswith(".conf"):
        touch(tmp_path, where)
        (tmp_path / where).write_text(f"# Ascend\n/{directory}\n")
    assert find_stack([], tmp_path).cann


def test_what_cannot_be_read_is_not_there(site: FakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process of vLLM looks, and most are of users who have nothing to do with NPUs."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/" + "x" * 300)  # as one that may not be entered: no `exists` answers
    garbage = {
        "etc/ld.so.conf": b"# f\xfcr\n/" + b"y" * 300,
        "sys/class/ubcore/udma0/device/ub_totalues": b"\xff\xfe",
        "sys/class/ubcore/udma1/device/ub_totalues": b"9" * 10_000,
    }
    for name, said in garbage.items():
        touch(tmp_path, name)
        (tmp_path / name).write_bytes(said)
    (tmp_path / "sys/class/ubcore/udma2/device/ub_totalues").mkdir(parents=True)
    (tmp_path / "dev/davinci0").mkdir(parents=True)
    for package in ("vllm-ascend", "vllm"):
        site.install(package, "0.32.0", {f"{package.replace('-', '_')}/__init__.py": ""})
        [metadata] = site.path.glob(f"{package.replace('-', '_')}-*.dist-info/METADATA")
        metadata.write_bytes(b"Name: \xff\nVersion: 0.32.0\n")
    (site.path / "vllm_ascend/_build_info.py").write_bytes(b"\xff\xfe")
    assert find_stack([str(site.path)], tmp_path) == AscendStack()


def altered(**changes: object) -> AscendStack:
    return AscendStack(**{**vars(COMPLETE), **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "stack", "notable", "why"),
    [
        ("auto", AscendStack(), False, "not installed: vllm-ascend, torch-npu"),
        ("force", AscendStack(), True, "not installed: vllm-ascend, torch-npu"),
        ("auto", altered(vllm_ascend=()), True, "not installed: vllm-ascend, though there is an NPU: /dev/davinci0"),
        ("auto", altered(torch_npu=(), nodes=()), True, "not installed: torch-npu"),
        ("off", COMPLETE, False, "DEEPINFER_VLLM_ASCEND=off"),
        ("auto", altered(nodes=(), driver=False), True, "no NPU: neither /dev/davinciN nor "),
        ("auto", altered(nodes=()), True, "the driver is here, but no NPU: "),
        ("auto", altered(cann=False), True, "the loader does not find CANN's libhccl.so"),
    ],
)
def test_dormant_in_one_sentence(mode: str, stack: AscendStack, notable: bool, why: str) -> None:
    for stock_loads in (True, False):
        activation = decide(mode, stack, stock_loads)
        assert (activation.route, activation.notable) == (Route.DORMANT, notable)
        assert activation.why.startswith(why) and "\n" not in activation.why + activation.remedy
        assert bool(activation.remedy) == notable


def test_the_remedy_for_cann_names_its_script() -> None:
    setup = "/usr/local/Ascend/cann-9.2.0/set_env.sh"
    assert decide("auto", altered(cann=False, cann_setup=setup), True).remedy == f"source {setup}"


@pytest.mark.parametrize(("stock_loads", "route"), [(True, Route.GRAFT), (False, Route.CLASS_PATH)])
def test_active_by_the_route_that_leaves_one_platform(stock_loads: bool, route: Route) -> None:
    assert decide("auto", COMPLETE, stock_loads) == Activation(
        route, "vllm-ascend 0.32.0, torch-npu 2.13.0, /dev/davinci0"
    )
    forced = decide("force", altered(nodes=(), driver=False, cann=False), stock_loads)
    assert forced.route is route and forced.why.endswith("no NPU, but DEEPINFER_VLLM_ASCEND=force")
