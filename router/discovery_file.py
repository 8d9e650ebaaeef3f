"""Engines that a file lists."""

from pathlib import Path
from threading import Event

from deepinfer_router.discovery import Failed, Found, PlainEngine
from deepinfer_router.errors import RouterConfigError
from deepinfer_router.file_stamp import stamp


class FileSource:
    """Looks at the file's stamp now and then: that works on every file system and for mounted ConfigMaps."""

    def __init__(self, path: str, poll_s: float) -> None:
        self.name = f"file {path}"
        self._path = Path(path)
        self._poll_s = poll_s

    def run(self, found: Found, failed: Failed, stop: Event) -> None:
        """See `discovery.Source`."""
        seen: object = self
        while True:
            now = stamp(self._path)
            if now != seen:
                seen = now
                try:
                    found(read_engines(self._path))
                except RouterConfigError as error:
                    failed(str(error))
            if stop.wait(self._poll_s):
                return


def read_engines(path: Path) -> list[PlainEngine]:
    """The engines of a file: a list, or `engines:` with one.

    Raises:
        RouterConfigError: it cannot be read, or an entry is wrong; which is said.
    """
    from pydantic import BaseModel, ConfigDict, ValidationError  # where no file is watched, nobody pays for these

    from deepinfer_router.config_errors import one_line
    from deepinfer_router.config_source import read_yaml
    from deepinfer_router.engine_config import EngineConfig, names_differ

    class Content(BaseModel):
        model_config = ConfigDict(extra="forbid")
        engines: tuple[EngineConfig, ...]

    content = read_yaml(path)
    if content is None or content == {}:
        raise RouterConfigError(f"{path}: empty: write [] where there are no engines")
    try:
        engines = Content.model_validate({"engines": content} if isinstance(content, list) else content).engines
        names_differ(engines)
    except ValidationError as error:
        raise RouterConfigError(f"{path}: {one_line(error, Content)}") from None
    except ValueError as error:
        raise RouterConfigError(f"{path}: {error}") from None
    return [engine.plain() for engine in engines]
