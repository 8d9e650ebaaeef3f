"""Images for tests: every pixel differs, so that no row, column or channel can be confused."""

from __future__ import annotations

import torch
from PIL import Image


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """RGB noise over a gradient."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 160, (height, width, 3), generator=generator)
    pixels += torch.linspace(0, 95, width).view(1, width, 1).long()
    return Image.fromarray(pixels.to(torch.uint8).numpy())
