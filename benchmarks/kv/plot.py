"""The rates of stores and loads by default, as bars: an SVG, which needs nothing to be drawn and stays sharp."""

from __future__ import annotations

from statistics import median
from typing import Any
from xml.sax.saxutils import escape

COLOURS = {"store": "#1f6feb", "fs": "#d29922", "raw": "#8b949e"}
TITLES = {"store": "the store", "fs": "vLLM's fs tier", "raw": "a plain file"}
CONTESTS = ("store", "load")
LEFT, WIDTH, BAR, GAP = 210, 520, 14, 14
"""Pixels: room for names, the longest bar, the height of a bar, the space between groups."""


def svg(results: dict[str, Any]) -> str:
    """A group of bars for every contest and shape; GB/s are written beside each bar."""
    groups = [(contest, shape) for contest in CONTESTS for shape in results["shapes"]]
    rates = {(c, s["payload_bytes"], s["requests"]): _rates(s, c) for c, s in groups}
    scale = WIDTH / max(rate for of_one in rates.values() for rate in of_one.values())
    parts, top = _legend(), 44
    for (contest, payload_bytes, requests), of_one in rates.items():
        many = "requests" if requests > 1 else "request"
        name = f"{contest}, {payload_bytes / 1000:.0f} KB, {requests} {many}"
        parts.append(_text(LEFT - 8, top + 2 * BAR - 3, name, "end"))
        for who, rate in of_one.items():
            parts.append(
                f'<rect x="{LEFT}" y="{top}" width="{rate * scale:.1f}" height="{BAR - 1}" fill="{COLOURS[who]}"/>'
            )
            parts.append(_text(LEFT + rate * scale + 5, top + BAR - 3, f"{rate:.2f} GB/s", "start"))
            top += BAR
        top += GAP
    size = f'width="{LEFT + WIDTH + 90}" height="{top}"'
    style = 'font-family="sans-serif" font-size="12" fill="#57606a"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', *parts, "</svg>", ""])


def _rates(shape: dict[str, Any], contest: str) -> dict[str, float]:
    payload = shape["payload_bytes"] * shape["requests"] * shape["blocks"]
    times = shape["times"][contest]
    return {who: payload / 1e9 / median(turn[who]["clock"] for turn in times) for who in TITLES}


def _legend() -> list[str]:
    parts = []
    for number, (who, title) in enumerate(TITLES.items()):
        at = LEFT + 150 * number
        parts.append(f'<rect x="{at}" y="12" width="12" height="12" fill="{COLOURS[who]}"/>')
        parts.append(_text(at + 17, 22, title, "start"))
    return parts


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
