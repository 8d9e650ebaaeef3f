"""The Python environment under examination: an interpreter and the directories it imports from."""

import re
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path


@dataclass(frozen=True)
class Environment:
    """`python` runs probes and pip; `paths` are searched for packages and their metadata, the first hit wins."""

    python: str
    paths: tuple[Path, ...]

    @classmethod
    def current(cls) -> "Environment":
        """The environment this process runs in."""
        return cls(sys.executable, tuple(Path(entry or ".").resolve() for entry in sys.path))

    def distribution(self, name: str) -> Distribution | None:
        """The installed distribution called `name`, or None."""
        return next(iter(distributions(name=name, path=[str(path) for path in self.paths])), None)

    def package_dir(self, name: str) -> Path | None:
        """The directory of the top-level package `name`, found without importing it, or None."""
        spec = PathFinder.find_spec(name, [str(path) for path in self.paths])
        locations = spec.submodule_search_locations if spec else None
        return Path(next(iter(locations))) if locations else None

    def entry_points(self, group: str) -> list[EntryPoint]:
        """The entry points of `group`, one distribution of each name counted, as `importlib.metadata` does."""
        seen: dict[str, Distribution] = {}
        for distribution in distributions(path=[str(path) for path in self.paths]):
            seen.setdefault(re.sub(r"[-_.]+", "-", distribution.name or "").lower(), distribution)
        return [point for found in seen.values() for point in found.entry_points if point.group == group]
