"""The operations that V4.1 and DSpark ask of a device, beside those that torch_npu registers for an NPU.

Nothing runs on an NPU. torch_npu is unpacked below build/, out of the environment's way (installed, it would break
`import torch` on a machine without CANN), and imported by a process of its own over stub libraries in the place of
CANN's. What the models ask is walked on a device that is emulated: see `tests/npu/walk.py`. Exits 1 if an operation is
not torch_npu's, is one that it computes on the host, or uses float64 or complex numbers.

Example: python benchmarks/ascend_ops.py --out benchmarks/results
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ascend.judge import COMPOSITE, judge, problems
from ascend.stubs import NoStubs, make_stubs
from facts import ROOT, facts, keep

BUILD = ROOT / "build" / "ascend-ops"
TORCH_NPU = "2.13.0"
"""The release for torch 2.13."""


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--wheel", type=Path, help=f"torch_npu's wheel; without, pip downloads {TORCH_NPU} (43 MB)")
    add("--out", type=Path, default=BUILD, help="where ascend_ops.json and ascend_ops.md go; default: %(default)s")
    args = parser.parse_args()
    if args.wheel and not args.wheel.is_file():
        parser.error(f"--wheel {args.wheel}: no such file")
    try:
        wheel = args.wheel or download()
        theirs = registrations(wheel)
    except (NoStubs, OSError) as error:
        raise SystemExit(f"ascend_ops: {error}") from None
    walked = walk()
    operations = theirs["operations"]
    results = {
        **facts(),
        "torch_npu": theirs["torch_npu"],
        "stubs": theirs["stubs"],
        "walked": {name: {"verdict": judge(name, met["reaches"], operations), **met} for name, met in walked.items()},
        "problems": problems(walked, operations),
        "registered": operations,
    }
    path = keep(results, args.out, "ascend_ops", page(results))
    for line in results["problems"]:
        print(line, file=sys.stderr)
    print(f"{len(walked)} operations walked, {len(results['problems'])} problems: {path}")
    return 1 if results["problems"] else 0


def download() -> Path:
    """torch_npu's wheel, from where pip gets its packages. Raises OSError."""
    BUILD.mkdir(parents=True, exist_ok=True)
    there = list(BUILD.glob(f"torch_npu-{TORCH_NPU}-*.whl"))
    if not there:
        print(f"pip download torch-npu=={TORCH_NPU}: 43 MB", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(BUILD)]
        done = subprocess.run([*command, f"torch-npu=={TORCH_NPU}"], capture_output=True, text=True)
        there = list(BUILD.glob(f"torch_npu-{TORCH_NPU}-*.whl"))
        if done.returncode or not there:
            said = done.stderr.strip().splitlines() or ["no wheel came"]
            raise OSError(f"torch-npu=={TORCH_NPU} cannot be had: {said[-1]}. Give a --wheel")
    return there[0]


def registrations(wheel: Path) -> dict[str, Any]:
    """What `ascend/registrations.py` prints, and the stub libraries it took. Raises NoStubs, OSError."""
    if not version("torch").startswith(TORCH_NPU):
        raise NoStubs(f"torch {version('torch')} is installed, torch_npu is for {TORCH_NPU}")
    site, stubs = BUILD / "site", BUILD / "stubs"
    if not (site / "torch_npu").is_dir():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    import torch

    own = site / "torch_npu"
    search = [Path(torch.__file__).parent / "lib", own / "lib", stubs]
    counts = make_stubs(sorted({*own.glob("*.so"), *own.glob("lib/*.so*")}), search[:2], stubs)
    paths = {"LD_LIBRARY_PATH": os.pathsep.join(map(str, search)), "PYTHONPATH": str(site)}
    environment = {**os.environ, **paths, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    program = [sys.executable, str(ROOT / "benchmarks" / "ascend" / "registrations.py")]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, cwd=BUILD)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise NoStubs(f"torch_npu cannot be imported: {said[-1]}")
    return {**json.loads(done.stdout.splitlines()[-1]), "stubs": counts}


def walk() -> dict[str, Any]:
    """What `tests/npu/walk.py` prints."""
    sys.path[:0] = [str(ROOT / "tests")]
    from npu.inside import run_inside

    with tempfile.TemporaryDirectory() as folder:
        print("walking the models on the emulated device: a minute", file=sys.stderr, flush=True)
        said = run_inside(Path(folder), "-m", "npu.walk")
    walked: dict[str, Any] = json.loads(said.splitlines()[-1])
    return walked


def page(results: dict[str, Any]) -> str:
    """The same for readers."""
    walked = results["walked"]
    counts = {verdict: sum(met["verdict"] == verdict for met in walked.values()) for verdict in ("npu", COMPOSITE)}
    stubs = results["stubs"]
    rows = [
        f"| `{name}` | {met['verdict']} | {', '.join(met['dtypes'])} | "
        f"{', '.join(f'`{part}`' for part in met['reaches']) if met['verdict'] == COMPOSITE else ''} |"
        for name, met in walked.items()
    ]
    lines = [
        "# Operations of V4.1, its tower and DSpark, and torch_npu's registrations",
        "",
        f"`{results['command']}`, {results['date']}, commit {results['commit']}. torch_npu {results['torch_npu']} over",
        f"{len(stubs)} stub libraries with {sum(stubs.values())} symbols for CANN's: nothing ran on an NPU.",
        "",
        f"{len(walked)} operations were met: {counts['npu']} are registered for the device, torch makes",
        f"{counts[COMPOSITE]} of such as are. {len(results['problems'])} problems{':' if results['problems'] else '.'}",
        *(f"- {line}" for line in results["problems"]),
        "",
        "| operation | by | dtypes on the device | made of |",
        "| --- | --- | --- | --- |",
        *rows,
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
