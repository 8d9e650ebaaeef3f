"""What the emulated device is, and what it refuses; run by `test_emulated_npu` in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from npu import device, kernels
from npu.memory import AWAY, to_host

device.install()
NPU = torch.device("npu", 0)
ON = {"device": NPU}


def test_tensors_are_the_devices() -> None:
    x = torch.arange(6, **ON).view(2, 3)
    assert type(x) is torch.Tensor and x.device == NPU and x.is_npu and not x.is_cpu
    assert torch.empty(0, device="npu").device == NPU
    assert torch.nn.Parameter(torch.ones(2, **ON)).device == NPU
    with torch.device("npu"):
        assert torch.tensor([1.0, 2.0]).device == NPU and torch.nn.Linear(2, 2).weight.device == NPU
    assert x.cpu().device.type == "cpu" and x.tolist() == [[0, 1, 2], [3, 4, 5]] and x[1, 2].item() == 5


@pytest.mark.parametrize(
    "mixed",
    [
        lambda here, there: here + there,
        lambda here, there: torch.mm(there, here),
        lambda here, there: torch.cat([here, there]),
        lambda here, there: there.masked_fill_(here > 0, 0),
        lambda here, there: there.index_select(0, torch.tensor([0])),
        lambda here, there: torch.add(here, here, out=there),
        lambda here, there: torch.where(here > 0, there, there),
        lambda here, there: torch.nn.functional.embedding(torch.tensor([0]), there),
    ],
)
def test_devices_do_not_mix(mixed: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        mixed(torch.ones(2, 2), torch.ones(2, 2, **ON))


def test_a_number_on_the_host_goes_with_any() -> None:
    assert (torch.ones(2, **ON) * torch.tensor(3.0)).tolist() == [3.0, 3.0]


def test_numpy_refuses_it() -> None:
    x = torch.ones(2, **ON)
    for ask in (lambda: x.numpy(), lambda: np.asarray(x), lambda: np.copyto(np.zeros(2), x)):
        with pytest.raises((TypeError, RuntimeError)):
            ask()


@pytest.mark.parametrize("read", ["ctypes.string_at(x.data_ptr(), 8)", "ctypes.memset(x[1:].data_ptr(), 0, 4)"])
def test_who_takes_its_address_for_the_hosts_dies(read: str) -> None:
    program = f"import ctypes, torch; from npu import device; device.install(); x = torch.ones(4, device='npu'); {read}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGSEGV, done.stderr


def test_copies_are_copies() -> None:
    here = torch.arange(4.0)
    there = here.to(NPU)
    here[0] = 9
    assert there.tolist() == [0, 1, 2, 3]
    back = there.cpu()
    there.zero_()
    assert back.tolist() == [0, 1, 2, 3] and there.sum().item() == 0
    here.copy_(there)
    assert here.tolist() == [0, 0, 0, 0]


def test_views_share_memory() -> None:
    x = torch.zeros(4, 6, **ON)
    x[1:3, ::2].fill_(1)
    x.t()[0, 0] = 5
    x.as_strided((2,), (7,), 1).add_(2)
    expected = torch.zeros(4, 6)
    expected[1:3, ::2] = 1
    expected[0, 0] = 5
    expected.as_strided((2,), (7,), 1).add_(2)
    assert torch.equal(x.cpu(), expected)
    assert x[1].untyped_storage().data_ptr() == x.untyped_storage().data_ptr() == x.data_ptr() > AWAY
    assert x.view(torch.int32).dtype == torch.int32 and x.unfold(1, 2, 2).shape == (4, 3, 2)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]
)
def test_every_type_goes_there_and_back(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, 1.0, 2.0]).to(dtype)
    there = values.to(NPU)
    assert there.dtype == dtype and there.device == NPU
    assert torch.equal(there.cpu().float(), values.float())


def test_what_is_written_in_place_is_what_was_given() -> None:
    x, out = torch.ones(3, **ON), torch.empty(0, **ON)
    assert x.mul_(2) is x and torch.add(x, x, out=out) is out
    assert out.tolist() == [4, 4, 4] and out.device == NPU
    assert torch.topk(torch.arange(5, **ON), 2).indices.tolist() == [4, 3]
    with torch.inference_mode():
        y = torch.zeros(3, **ON)
        y[torch.tensor([0, 2], **ON)] = 1
    assert y.tolist() == [1, 0, 1]


def test_memory_lives_as_long_as_its_views() -> None:
    views = [torch.full((1 << 16,), float(i), **ON)[7:9] for i in range(50)]
    host = [to_host(view) for view in views]
    del views
    assert [each.tolist() for each in host] == [[i, i] for i in map(float, range(50))]


def test_it_tells_what_reaches_it() -> None:
    told: list[str] = []
    x = torch.ones(2, 3, **ON)
    with kernels.watching(lambda op: told.append(op._name)):
        torch.nn.functional.linear(x, x)
    assert "aten::mm.out" in told or "aten::mm" in told
    before = len(told)
    x + x
    assert len(told) == before
