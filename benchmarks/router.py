"""Speed of the router beside vllm-router and HAProxy: CPU of a request and a token, latency, memory, failures.

Each proxy runs on one core, engines and clients (in C, compiled here) on another, in turns. Exits 1 when a limit is not
met. vllm-router 0.1.17 is taken from --vllm-router or PATH; install it into an environment of its own.

Example: python benchmarks/router.py --rounds 1 --seconds 1 --vllm-router build/vllm-router/bin/vllm-router
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from facts import ROOT, facts


def main() -> None:
    """Measure, write the results, print the page."""
    args = _arguments()
    from proxy import contenders
    from proxy.contenders import found
    from proxy.report import losses, write
    from proxy.rounds import measure

    contenders.ROUTER_PYTHON = args.python
    programs = {name: found(name, getattr(args, name.replace("-", "_"))) for name in ("vllm-router", "haproxy")}
    for name, path in programs.items():
        if path is None:
            _say(f"{name} is absent: its rows will be, too")
    with tempfile.TemporaryDirectory(prefix="router-bench-") as scratch:
        results = {
            **facts("" if sys.argv[1:] else "make bench-router"),
            "rounds": measure(
                Path(scratch), args.rounds, args.seconds, programs["vllm-router"], programs["haproxy"], _say
            ),
        }
        if not args.no_failures:
            from proxy.scenes import failure_rows

            results["absolute"], results["failures"] = failure_rows(Path(scratch), args.aborts, programs, _say)
            results["absolute"] += _beside(Path(scratch), args.rounds, args.seconds, results)
    lost = losses(results["rounds"])
    asked = [args.python, "-c", "import sys; print(sys.version)"]
    version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    results["router_python"] = " ".join(version.split())
    results["notes"] = ["Where others take less:", "", *lost] if lost else []
    page = write(results, args.out)
    print(page.read_text())
    sys.exit(any(limit["verdict"] == "not met" for limit in results["limits"]))


def _beside(scratch: Path, rounds: int, seconds: float, results: dict[str, Any]) -> list[Any]:
    """Limits on what CHECK adds, and on what large prompts do to others; their numbers go to `results`."""
    from proxy.large import measure as large
    from proxy.store import check_ms, recipe

    results["check_added_ms"] = check_ms(scratch, rounds, seconds, _say)
    rows: list[Any] = [("CHECK of 16,384 tokens adds: ms", results["check_added_ms"], 3.0)]
    for name, config in (("passed on", ""), ("encoded by recipe", recipe(scratch / "large-recipe"))):
        _say(f"prompts of 1 MB, {name}")
        results[f"large, {name}"] = found = large(scratch, 10 * seconds, config)
        rows.append((f"event loop's lag, p99, prompts of 1 MB {name}: ms", [found["loop_lag_p99_ms"]], 5.0))
    return rows


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="of every load on every proxy; default: 5")
    add("--seconds", type=float, default=2.0, help="of every load, after one that warms up; default: 2")
    add("--aborts", type=int, default=10_000, help="clients that leave; default: 10000")
    add("--python", default=sys.executable, help="that runs our router, and has its dependencies; default: this one")
    add("--vllm-router", help="program; default: beside this Python or on PATH")
    add("--haproxy", help="program; default: on PATH")
    add("--no-failures", action="store_true", help="speed alone")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results", help="directory for router.json and .md")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: must be at least 1")
    if not 0.2 <= args.seconds <= 60:
        parser.error(f"--seconds {args.seconds}: must be between 0.2 and 60")
    for name in ("vllm_router", "haproxy", "python"):
        if (path := getattr(args, name)) and not Path(path).is_file():
            parser.error(f"--{name.replace('_', '-')} {path}: no such file")
    return args


if __name__ == "__main__":
    main()
