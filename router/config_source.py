"""Reads the configuration from a file and the command line, and says in one line what is wrong with it."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deepinfer_router.config import RouterConfig
from deepinfer_router.config_errors import one_line
from deepinfer_router.errors import RouterConfigError

MAX_FILE_BYTES = 4 << 20
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(:-([^}]*))?\}")


@dataclass(frozen=True)
class ConfigSource:
    """A file, and what the command line puts over it."""

    path: Path | None = None
    over: dict[str, Any] = field(default_factory=dict)
    """Settings by dotted name, as `process.workers`; a list replaces the file's."""

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "ConfigSource":
        """The source that `plain` made."""
        return cls(Path(plain["path"]) if plain["path"] else None, plain["over"])

    def plain(self) -> dict[str, Any]:
        """Of plain types, for another process."""
        return {"path": str(self.path) if self.path else "", "over": self.over}

    @property
    def where(self) -> str:
        """For errors."""
        return str(self.path or "command line")

    def read(self, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
        """All that is set, unchecked: plain types, with `${NAME}` and `${NAME:-default}` replaced.

        Raises:
            RouterConfigError: the file cannot be read, is not YAML, or names a variable that is not set.
        """
        settings: dict[str, Any] = {}
        if self.path:
            settings = _replaced(read_yaml(self.path), environment, str(self.path), "")
            if not isinstance(settings, dict):
                raise RouterConfigError(f"{self.path}: must have sections, as `engines:`, not {settings!r:.80}")
        for name, value in self.over.items():
            *sections, last = name.split(".")
            place = settings
            for section in sections:
                place = place.setdefault(section, {})
                if not isinstance(place, dict):
                    raise RouterConfigError(f"{self.path}: {section}: must be a section, not {place!r:.80}")
            place[last] = value
        return settings


def checked(settings: dict[str, Any], where: str) -> RouterConfig:
    """A configuration of plain types, checked.

    Raises:
        RouterConfigError: a setting that cannot work; `where` it stands is said.
    """
    try:
        return RouterConfig.model_validate(settings)
    except ValidationError as error:
        raise RouterConfigError(f"{where}: {one_line(error, RouterConfig)}") from None


def read_yaml(path: Path) -> Any:
    """What a YAML (or JSON) file says; nothing where it is empty.

    Raises:
        RouterConfigError: it cannot be read, is too large, or is not YAML.
    """
    import yaml

    resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:timestamp"]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    loader = type("Loader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": resolvers})  # dates stay strings
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise RouterConfigError(f"{path}: larger than {MAX_FILE_BYTES:,} bytes: is it the right file?")
        content = yaml.load(text, loader)
    except OSError as error:
        raise RouterConfigError(f"{path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise RouterConfigError(f"{path}: not YAML: {' '.join(str(error).split())[:300]}") from None
    return {} if content is None else content


def _replaced(value: Any, environment: Mapping[str, str], where: str, at: str) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(below, environment, where, f"{at}.{key}".lstrip(".")) for key, below in value.items()}
    if isinstance(value, list):
        return [_replaced(below, environment, where, f"{at}.{index}") for index, below in enumerate(value)]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        found = environment.get(match[1], match[3] if match[2] else None)
        if found is None:
            raise RouterConfigError(
                f"{where}: {at}: ${{{match[1]}}} is not set: export {match[1]}, or write ${{{match[1]}:-default}}"
            )
        return found

    return _VARIABLE.sub(replace, value)
