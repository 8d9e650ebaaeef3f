"""Horizontal bars as SVG, which needs nothing to be drawn and stays sharp."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

LEFT, WIDTH, BAR, STEP, TOP = 300, 460, 14, 20, 34
"""Pixels: room for names, the longest bar, the height of a bar, from bar to bar, and of the title."""


def svg(title: str, rows: Sequence[tuple[str, float]]) -> str:
    """A bar a row, (name, value); the value is written beside it."""
    most = max((value for _, value in rows), default=0.0) or 1.0
    parts = [_text(LEFT, 20, title, "start")]
    for number, (name, value) in enumerate(rows):
        y = TOP + STEP * number
        length = WIDTH * max(0.0, value) / most
        parts.append(_text(LEFT - 8, y + BAR - 3, name, "end"))
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" fill="#1f6feb"/>')
        parts.append(_text(LEFT + length + 6, y + BAR - 3, f"{value:.3g}", "start"))
    size = f'width="{LEFT + WIDTH + 70}" height="{TOP + STEP * len(rows) + 6}"'
    style = 'font-family="sans-serif" font-size="12" fill="#57606a"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
