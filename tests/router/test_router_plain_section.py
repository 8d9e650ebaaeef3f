"""Workers without pydantic and numpy: the configuration that they get is the one that was checked."""

import pickle
import subprocess
import sys
from pathlib import Path

from deepinfer_router.config_source import ConfigSource
from deepinfer_router.startup import prepare

READER = """
import pickle, sys
from deepinfer_router.plain_section import instead_of_pydantic
instead_of_pydantic()
import deepinfer_router.app, deepinfer_router.worker
config = pickle.loads(sys.stdin.buffer.read())

def plain(value):
    if hasattr(value, "__dict__") and type(value).__module__.endswith("config"):
        return {name: plain(each) for name, each in sorted(vars(value).items())}
    if isinstance(value, tuple):
        return [plain(each) for each in value]
    return str(value)

print(plain(config))
heavy = ("pydantic", "yaml", "numpy", "deepseek_recipe", "llguidance")
print(sorted(name for name in sys.modules if name.startswith(heavy)))
from deepinfer_router.fleet_config import FleetConfig
print(FleetConfig().probe_s == config.fleet.probe_s, FleetConfig(probe_s=7).probe_s)
"""


def plain(value: object) -> object:
    """As the reader has it."""
    if hasattr(value, "model_fields_set"):
        return {name: plain(each) for name, each in sorted(vars(value).items())}
    return [plain(each) for each in value] if isinstance(value, tuple) else str(value)


def test_a_worker_has_what_was_checked_and_nothing_heavy(root: Path) -> None:
    source = ConfigSource(root / "examples/router.yaml", {"admin.token": "a secret of sixteen"})
    config, boot = prepare(source)
    assert b"a secret" not in boot.config
    done = subprocess.run([sys.executable, "-c", READER], input=boot.config, capture_output=True, check=True)
    settings, modules, defaults = done.stdout.decode().splitlines()
    assert settings == str(plain(pickle.loads(boot.config)))
    assert modules == "[]"
    assert defaults == "True 7"
    assert pickle.loads(boot.config).engines == config.engines
