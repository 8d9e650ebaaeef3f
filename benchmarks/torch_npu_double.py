"""A stand-in for torch-npu and what else vllm-ascend imports on NPU hosts: its configuration then runs without one.

Modules of these names import, and whatever is asked of them is a mock. Nothing computes on it.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

NAMES = ("torch_npu", "acl", "mooncake")


class Double(ModuleType):
    """A module that has every attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {}) if name[:1].isupper() else MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)  # the same at every look; a class where one may be derived from it
        return value


class Doubles(MetaPathFinder, Loader):
    """Finds the packages of NAMES and all that is asked for below them."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, origin=__file__, is_package=True) if name.partition(".")[0] in NAMES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Double(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: attributes are made when they are looked at."""


def install() -> None:
    """Once in a process of its own: torch's registries know of the device ever after."""
    sys.meta_path.insert(0, Doubles())
    import torch

    torch.utils.rename_privateuse1_backend("npu")
    torch.npu = Double("torch.npu")
    torch.npu.is_available = lambda: False
    torch.version.cann = None
