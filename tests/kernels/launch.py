"""One launch of a kernel on random arguments, made the same here and in the process that has Triton's interpreter."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from deepinfer_vllm.torch_kernels.registry import KERNELS, bound, load

SEEDS = range(4)


@dataclass
class Launch:
    """Grid and arguments by parameter name, in the kernel's order."""

    grid: tuple[int, ...]
    args: dict[str, Any]
    pointed_at: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors behind addresses among the arguments."""

    def run(self, kernel: Any) -> dict[str, torch.Tensor]:
        """Launch as vLLM does, constants by name and the rest by position: every tensor as it is afterwards."""
        constants = {name: value for name, value in self.args.items() if name.isupper()}
        kernel[self.grid](*(value for name, value in self.args.items() if not name.isupper()), **constants)
        tensors = {name: value for name, value in self.args.items() if isinstance(value, torch.Tensor)}
        return {n: t for n, t in {**tensors, **self.pointed_at}.items() if t.dtype != torch.uint64}


@dataclass(frozen=True)
class Case:
    """`make` draws a launch of the kernel, by its name below vllm.v1.worker.gpu."""

    kernel: str
    make: Callable[[Random], Launch]
    tolerance: float = 0.0
    """Of floating-point values, relative and absolute. 0: to the last bit."""

    @property
    def name(self) -> str:
        return self.kernel if self.kernel.startswith("vllm.") else f"vllm.v1.worker.gpu.{self.kernel}"

    @property
    def id(self) -> str:
        return f"{self.kernel.rpartition('.')[2]}-{self.make.__name__}"

    def override(self) -> Any:
        """Our function, launched as vLLM's registry launches it."""
        function = load(KERNELS[self.name])
        return _Launchable(bound(function, tuple(self.make(Random(0)).args)))


class _Launchable:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        if not getattr(self.function, "takes_grid", False):
            return self.function
        return lambda *args, **constants: self.function(grid, *args, **constants)


class Random:
    """Random tensors, a generator for each seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """In [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator).to(dtype)

    def integer(self, low: int, high: int) -> int:
        """In [low, high)."""
        return int(self.integers(low, high, 1))

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def choice(self, values: list[Any], count: int) -> list[Any]:
        """`count` of the values, with repetition."""
        return [values[i] for i in self.integers(0, len(values), count).tolist()]

    def distinct(self, count: int, below: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """`count` different integers below a bound."""
        return torch.randperm(below, generator=self.generator)[:count].to(dtype)


def bounds(lengths: torch.Tensor) -> torch.Tensor:
    """Cumulative sums from 0, int32."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()


def addresses(tensors: list[torch.Tensor]) -> torch.Tensor:
    """As vLLM keeps them."""
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.uint64)


def all_cases() -> Iterator[Case]:
    """Every case of `kernels.cases`."""
    package = importlib.import_module("kernels.cases")
    for module in pkgutil.iter_modules(package.__path__):
        yield from importlib.import_module(f"kernels.cases.{module.name}").CASES
