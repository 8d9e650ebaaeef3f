"""One concept a file: no file is long, and most are short."""

from pathlib import Path
from statistics import median

ROOMS = ("deepinfer_vllm", "kvstore", "costmodel", "router", "simulator")
MAX_LINES = 600
MEDIAN_LINES = 150


def line_counts(root: Path, directories: tuple[str, ...]) -> dict[str, int]:
    return {
        str(file.relative_to(root)): len(file.read_text().splitlines())
        for directory in directories
        for file in (root / directory).rglob("*.py")
    }


def test_no_file_is_long(root: Path) -> None:
    counts = line_counts(root, (*ROOMS, "tests", "examples", "benchmarks"))
    assert {name: lines for name, lines in counts.items() if lines > MAX_LINES} == {}


def test_most_package_files_are_short(root: Path) -> None:
    # Empty __init__.py files would flatter the median.
    counts = [lines for lines in line_counts(root, ROOMS).values() if lines > 2]
    assert median(counts) < MEDIAN_LINES
