"""Bars of moe_lb as a PNG: a group a trace or layer, a bar a placement."""

from collections.abc import Mapping
from pathlib import Path

COLOURS = ("#57606a", "#bf3989", "#9a6700", "#0969da", "#1a7f37", "#cf222e")
HEIGHT, LEFT, TOP, BOTTOM, RIGHT, BAR = 360, 60, 40, 40, 180, 9


def draw(path: Path, title: str, groups: Mapping[str, Mapping[str, float]]) -> None:
    """Write the picture; groups: name to {series: value of 1 or more}, the same series in each. Raises OSError."""
    from PIL import Image, ImageDraw

    series = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    wide = BAR * len(series) + BAR
    highest = max(1.01, *(value for bars in groups.values() for value in bars.values()))
    image = Image.new("RGB", (max(480, LEFT + wide * len(groups) + RIGHT), HEIGHT), "white")
    picture = ImageDraw.Draw(image)

    def height(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (highest - value) / (highest - 1)

    picture.text((LEFT, 12), title, "black")
    for step in range(5):
        value = 1 + (highest - 1) * step / 4
        picture.line([(LEFT, height(value)), (LEFT + wide * len(groups), height(value))], "#d0d7de")
        picture.text((8, height(value) - 6), f"{value:.3f}", "black")
    for number, (name, bars) in enumerate(groups.items()):
        left = LEFT + wide * number + BAR // 2
        picture.text((left, HEIGHT - BOTTOM + 8), name, "black")
        for place, one in enumerate(series):
            if one in bars:
                x = left + BAR * place
                picture.rectangle([x, height(bars[one]), x + BAR - 2, height(1)], COLOURS[place % len(COLOURS)])
    for place, one in enumerate(series):
        at = (image.width - RIGHT + 12, TOP + 18 * place)
        picture.rectangle([at[0], at[1] + 2, at[0] + 8, at[1] + 10], COLOURS[place % len(COLOURS)])
        picture.text((at[0] + 14, at[1]), one, "black")
    image.save(path, "PNG")
