"""What `make bench-kvstore` moves, and what it calls met."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from kv.contender import Contender, Request, Rows  # noqa: E402
from kv.raw_file import RawCalls, RawFile  # noqa: E402
from kv.report import Limit, judge, table, write  # noqa: E402
from kv.slab_store import SlabStore  # noqa: E402

PAYLOAD_BYTES, BLOCKS = 5000, 6


@pytest.fixture
def rows() -> Rows:
    return Rows(PAYLOAD_BYTES, 2 * BLOCKS)


def requests() -> list[Request]:
    return [Request([bytes([request, block] * 16) for block in range(BLOCKS)], request * BLOCKS) for request in (0, 1)]


def test_rows_are_padded_to_pages_and_hold_different_blocks(rows: Rows) -> None:
    assert rows.view.strides == (8192, 1) and rows.view.shape == (4 * BLOCKS, 8192)
    assert len({bytes(rows.payload[row]) for row in range(2 * BLOCKS)}) == 2 * BLOCKS
    with pytest.raises(RuntimeError, match="me: loaded other bytes than were stored"):
        rows.check("me")


def _moves_every_byte(contender: Contender, rows: Rows) -> None:
    contender.store(requests())
    for _ in range(2):
        contender.load(requests())
        rows.check("it")
        rows.clear()
    contender.load(requests()[:1])
    with pytest.raises(RuntimeError, match="other bytes"):
        rows.check("it")


@pytest.mark.parametrize("direct", [True, False])
def test_the_raw_file(rows: Rows, tmp_path: Path, direct: bool) -> None:
    file = RawFile(tmp_path / "raw", rows, direct=direct)
    raw = RawCalls(file, threads=2)
    _moves_every_byte(raw, rows)
    assert (tmp_path / "raw").stat().st_size == 2 * BLOCKS * rows.row_bytes
    raw.close()
    file.close()


def test_the_store(rows: Rows, tmp_path: Path) -> None:
    """Two stores, one of them through the page cache, see each other's blocks."""
    (tmp_path / "root").mkdir()
    stores = [SlabStore(tmp_path / "root", rows, direct=direct, threads=2) for direct in ("auto", "off")]
    _moves_every_byte(stores[0], rows)
    stores[1].load(requests())
    rows.check("the other one")
    with pytest.raises(RuntimeError, match="store: 0 of 1 blocks loaded"):
        stores[1].load([Request([b"x" * 32], 0)])
    for store in stores:
        store.close()


@pytest.mark.vllm
def test_the_file_tier_of_vllm(rows: Rows, tmp_path: Path) -> None:
    from kv.fs_tier import FsTier

    tier = FsTier(tmp_path, rows)
    _moves_every_byte(tier, rows)
    assert {path.stat().st_size for path in tier.files()} == {rows.row_bytes}
    assert len(tier.files()) == 2 * BLOCKS
    missing = [Request([b"x" * 32], 0)]
    with pytest.raises(RuntimeError, match="fs tier: 0 of 1 jobs succeeded"):
        tier.load(missing)
    tier.close()


@pytest.mark.parametrize(
    ("ratio", "aim", "verdict"),
    [(2.0, 2.5, "met, aim missed"), (2.5, 2.5, "met, aim too"), (2.0, None, "met"), (1.99, None, "not met")],
)
def test_verdicts(ratio: float, aim: float | None, verdict: str) -> None:
    assert Limit("load", "fs", 2.0, aim).verdict(ratio) == verdict


def test_a_ratio_is_of_one_rounds_rates() -> None:
    """Medians of rates would say 2 here; every single round says 4."""
    page = table(_results([(1.0, 4.0), (3.0, 12.0), (2.0, 8.0)]))
    assert "| 1,000 | 2 | store, over vLLM's fs tier | 4.00× (4.00 to 4.00) | 2× |  | met |" in page
    assert "| 1,000 | 2 | load, over vLLM's fs tier | 4.00× (4.00 to 4.00) | 1.3× | 1.5× | met, aim too |" in page
    assert "| 1,000 | 2 | store | 3.00 | 0.75 | 1.50 | 1.50 |" in page
    assert "| 1,000 | 2 | load, cold | 3.00 |  |  | 1.50 | 1.50 |" in page


def test_bars_are_as_long_as_rates_are_high(tmp_path: Path) -> None:
    write(_results([(1.0, 4.0)]), tmp_path, "it")
    bars = [node for node in ElementTree.parse(tmp_path / "it.svg").iter() if node.tag.endswith("rect")][3:]
    assert [float(bar.attrib["width"]) for bar in bars] == 2 * [520.0, 130.0, 260.0]  # store and load: ours, fs, file
    assert "![the rates by default](it.svg)" in (tmp_path / "it.md").read_text()


def test_a_limit_that_is_not_met_is_named() -> None:
    rows = judge(_results([(2.0, 2.5)])["shapes"])
    assert [(row["contest"], row["over"], row["verdict"]) for row in rows] == [
        ("store", "fs", "not met"),
        ("store", "fs_aged", "met"),
        ("load", "fs", "not met"),
        ("load", "raw", "met"),
        ("load", "raw_all", "met"),
        ("load, cold", "raw", "met"),
        ("load, cold", "raw_all", "met"),
        ("load, page cache", "raw", "met"),
        ("load, page cache", "raw_all", "met"),
    ]


def _results(seconds: list[tuple[float, float]]) -> dict[str, Any]:
    """Of rounds in which the store and the file tier took these times, and the raw file twice the store's."""

    def times(*names: str) -> list[dict[str, dict[str, float]]]:
        return [
            {who: {"clock": {"store": store, "fs": fs}.get(who, 2 * store)} for who in names} for store, fs in seconds
        ]

    contests = {
        "store": times("store", "fs", "fs_aged", "raw", "raw_all"),
        "load": times("store", "fs", "raw", "raw_all"),
        "load, cold": times("store", "raw", "raw_all"),
        "load, page cache": times("store", "raw", "raw_all"),
    }
    shape = {"payload_bytes": 1000, "requests": 2, "blocks": 3_000_000, "times": contests}
    machine = {"cpu": "a CPU", "cores": 2, "vllm": "1"}
    facts = {"command": "make", "commit": "abc", "date": "today", "machine": machine}
    return {**facts, "rounds": len(seconds), "threads": 8, "shapes": [shape]}


def test_limits_inside_an_engine() -> None:
    from kv.engine_report import table as engine_table

    first = [{"computed": 10.0, "from_store": seconds, "from_store_cached_tokens": 64.0} for seconds in (1.0, 1.4, 2.0)]
    decode = [{"off": 0.11, "off_connector": 0.01, "on": 0.11, "on_stored_blocks": 5.0}]
    plan = {"shared_tokens": 64, "tail_tokens": 8, "decode_tokens": 4, "decode_prompt_tokens": 16}
    machine = {"cpu": "a CPU", "cores": 2, "torch": "2", "vllm": "1"}
    facts = {"command": "make", "commit": "abc", "date": "today", "machine": machine, "preset": "mid"}
    page = engine_table({**facts, "plan": plan, "first_token": first, "decode": decode})
    assert "| first token, from the store over computed | 0.140× (0.100 to 0.200) | 0.15× | met |" in page
    assert "| a token after it, stores running over no store | 1.100× (1.100 to 1.100) | 1.05× | not met |" in page
