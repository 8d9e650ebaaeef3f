"""Lines over concurrency as a PNG."""

from __future__ import annotations

from math import log2
from pathlib import Path

from PIL import Image, ImageDraw

SIZE, LEFT, BOTTOM, TOP, RIGHT = (900, 480), 70, 50, 40, 150
COLOURS = ("#0969da", "#bf3989", "#9a6700", "#57606a", "#cf222e", "#8250df", "#1a7f37")


def plot(path: Path, title: str, lines: dict[str, list[tuple[int, float]]]) -> None:
    """lines: (concurrency, percent) by rule; concurrency is drawn to base 2."""
    image = Image.new("RGB", SIZE, "white")
    draw = ImageDraw.Draw(image)
    most = max(x for line in lines.values() for x, _ in line)
    highest = max(y for line in lines.values() for _, y in line)
    lowest = min(-5.0, *(max(y, -30.0) for line in lines.values() for _, y in line))

    def at(x: float, y: float) -> tuple[float, float]:
        across = (SIZE[0] - LEFT - RIGHT) * log2(max(x, 1)) / max(1.0, log2(most))
        return LEFT + across, TOP + (SIZE[1] - TOP - BOTTOM) * (highest - max(y, lowest)) / (highest - lowest)

    draw.text((LEFT, 12), title, "black")
    draw.line([at(1, 0), at(most, 0)], "#d0d7de", 2)
    for percent in (lowest, 0.0, highest):
        draw.text((8, at(1, percent)[1] - 6), f"{percent:+.1f} %", "black")
    for level in (1, 4, 16, 64, 256):
        if level <= most:
            draw.text((at(level, lowest)[0] - 6, SIZE[1] - BOTTOM + 12), str(level), "black")
    for number, ((name, line), colour) in enumerate(zip(lines.items(), COLOURS, strict=False)):
        draw.line([at(x, y) for x, y in line], colour, 2)
        draw.text((SIZE[0] - RIGHT + 12, TOP + 18 * number), name, colour)
    image.save(path)
