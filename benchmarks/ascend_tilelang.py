"""The TileLang kernels for Ascend 950: emitted as AscendC for the released model's shapes, and run as C on a CPU.

Nothing here runs on an NPU, and what is emitted is not compiled: that takes CANN. On the CPU each kernel meets loops in
float64 and the portable model's operation, on shapes small enough for loops. Exits 1 when a kernel is not emitted or
differs by more than its dtype's rounding. `make ascend-kernels` makes the environment that this needs.

Example: build/ascend-kernels/bin/python benchmarks/ascend_tilelang.py --keep-source build/ascendc
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from facts import ROOT, facts, keep

COUNTED = {
    "products": r"\basc_mmad\(|\bascend_gemm_l1<",
    "copies in": r"\basc_copy_gm2\w+\(",
    "copies out": r"\basc_copy_ub2gm\w*\(",
    "vector functions": r"\basc_vf_call<",
    "flags between cores": r"\basc_sync_intra_\w+\(",
}
"""What a line of AscendC may hold: of the cube unit, from and to memory, calls of SIMT code, waits for another core."""


def main() -> None:
    """Emit, run, write the results."""
    args = _arguments()
    try:
        import tilelang.ascend  # noqa: F401
    except ImportError as missing:
        raise SystemExit(
            f"ascend_tilelang: {missing}; `make ascend-kernels` makes an environment that has it"
        ) from None
    from tiles.shapes import SHAPES

    emitted = {name: _emit(name, args.keep_source) for name in SHAPES}
    run = _run()
    results = {
        **facts("" if sys.argv[1:] else "make ascend-kernels"),
        "tilelang": version("tilelang"),
        "emitted": emitted,
        "run": run,
    }
    path = keep(results, args.out, "ascend_tilelang", page(results))
    wrong = [row for row in run if not row["right"]]
    for row in wrong:
        print(f"WRONG {row['kernel']} {row['dtype']} {row['case']}: {row['error']:.2e} > {row['bound']:.2e}")
    failed = [name for name, row in emitted.items() if row.get("failed")]
    for name in failed:
        print(f"NOT EMITTED {name}: {emitted[name]['failed']}")
    print(
        f"{len(emitted) - len(failed)} of {len(emitted)} emitted, {len(run) - len(wrong)} of {len(run)} right: {path}"
    )
    sys.exit(bool(wrong or failed))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="where the results go")
    parser.add_argument("--keep-source", type=Path, help="a directory for the AscendC itself")
    return parser.parse_args()


def _emit(name: str, keep_in: Path | None) -> dict[str, Any]:
    from tiles.shapes import SHAPES

    from deepinfer_vllm.platforms.tilelang.launch import emitted

    build, arguments = SHAPES[name]
    print(f"[{time.strftime('%H:%M:%S')}] emit {name}", file=sys.stderr, flush=True)
    about = {"arguments": list(arguments)}
    try:
        source = emitted(build, *arguments)
    except Exception as error:  # whatever TileLang raises is the result
        return {**about, "failed": str(error).strip().splitlines()[-1]}
    if keep_in:
        keep_in.mkdir(parents=True, exist_ok=True)
        (keep_in / f"{re.sub('[^a-z0-9]+', '_', name)}.cpp").write_text(source)
    return {
        **about,
        "bytes": len(source),
        "lines": len(source.splitlines()),
        "sha256": hashlib.sha256(source.encode()).hexdigest(),
        **{what: len(re.findall(pattern, source)) for what, pattern in COUNTED.items()},
    }


def _run() -> list[dict[str, Any]]:
    from tiles.check import checks

    rows = []
    for check in checks():
        print(
            f"[{time.strftime('%H:%M:%S')}] run {check.kernel} {check.case} {check.dtype}", file=sys.stderr, flush=True
        )
        loops, portable = check.errors()
        rows.append(
            {
                "kernel": check.kernel,
                "case": asdict(check.case),
                "dtype": str(check.dtype).removeprefix("torch."),
                "error": loops,
                "error_beside_portable": portable,
                "bound": check.error,
                "right": max(loops, portable) <= check.error,
            }
        )
    return rows


def page(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    text = [
        "# TileLang kernels for Ascend 950",
        "",
        f"`{results['command']}`, commit {results['commit']}, {results['date']}, TileLang {results['tilelang']}, torch "
        f"{results['machine']['torch']}. Emitted, not compiled; nothing ran on an NPU. What it means: "
        "[docs/ascend-kernels.md](../../docs/ascend-kernels.md).",
        "",
        "## AscendC for the released model's shapes",
        "",
        "| kernel | lines | bytes | " + " | ".join(COUNTED) + " |",
        "|---|---|---|" + "---|" * len(COUNTED),
    ]
    for name, row in results["emitted"].items():
        cells = [row.get("failed", ""), "", *[""] * len(COUNTED)]
        if "failed" not in row:
            cells = [f"{row['lines']:,}", f"{row['bytes']:,}", *(str(row[what]) for what in COUNTED)]
        text.append(f"| {name} | " + " | ".join(cells) + " |")
    text += [
        "",
        "## On a CPU, as C",
        "",
        "The largest difference over all cases, beside the largest value of its tensor.",
        "",
        "| kernel | dtype | cases | from loops in float64 | from the portable operation | allowed |",
        "|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in results["run"]:
        groups.setdefault((row["kernel"], row["dtype"]), []).append(row)
    for (kernel, dtype), rows in sorted(groups.items()):
        worst = (max(row[which] for row in rows) for which in ("error", "error_beside_portable", "bound"))
        text.append(f"| {kernel} | {dtype} | {len(rows)} | " + " | ".join(f"{value:.1e}" for value in worst) + " |")
    return "\n".join([*text, ""])


if __name__ == "__main__":
    main()
