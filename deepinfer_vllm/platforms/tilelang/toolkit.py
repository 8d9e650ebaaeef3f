"""Whether this machine can compile AscendC: CANN's compiler and a TileLang that emits it."""

import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

COMPILER = "bisheng"
HOMES = ("BISHENG_HOME", "ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
"""Variables that CANN's scripts set; the compiler is in `bin` below each."""
INSTALLED = ("usr/local/Ascend/ascend-toolkit/latest", "usr/local/Ascend/cann")


def compiler(environ: Mapping[str, str] | None = None, root: Path = Path("/")) -> Path | None:
    """CANN's compiler: named by a variable of `environ`, on its PATH, or where CANN installs itself below `root`."""
    environ = os.environ if environ is None else environ
    homes = [Path(environ[name]) for name in HOMES if environ.get(name)] + [root / place for place in INSTALLED]
    for home in homes:
        if os.access(home / "bin" / COMPILER, os.X_OK):
            return home / "bin" / COMPILER
    found = shutil.which(COMPILER, path=environ.get("PATH", ""))
    return Path(found) if found else None


def emitter() -> str | None:
    """Why TileLang here cannot emit AscendC; None if it can. Does not import it."""
    found = importlib.util.find_spec("tilelang")
    if found is None or not found.origin:
        return "TileLang is not installed"
    if not (Path(found.origin).parent / "ascend" / "language").is_dir():
        return "the TileLang that is installed has no Ascend backend: 0.1.15 has"
    return None
