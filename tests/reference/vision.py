"""From a decoded image to the embeddings of its places in the prompt: preprocessing, tower, aligner, span.

Pixels come from Pillow, as does the resampling of them; everything else is written out here.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from reference.layers import linear, rms_norm
from reference.weights import read_weights

NORM_EPS = 1e-6
GREY = (127, 127, 127)


@dataclass(frozen=True)
class Grid:
    """One image's size in patches, and in what the aligner makes of them."""

    rows: int
    columns: int
    merged_rows: int
    merged_columns: int

    @property
    def places(self) -> int:
        """Tokens in the prompt: start, rows that each end in a newline, end."""
        return self.merged_rows * (self.merged_columns + 1) + 2


class Vision:
    """The vision part of a checkpoint, in float64."""

    def __init__(self, directory: Path) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())["vision_config"]
        self.weights = {name: tensor.double() for name, tensor in read_weights(directory).items()}

    def span(self, image: Image.Image) -> torch.Tensor:
        """The embeddings [places, D] of an image."""
        patches, grid = self.patches(image)
        merged = self.align(self.tower(patches, grid), grid)
        rows = [torch.cat([row, self.weights["image_newline"][None]]) for row in merged.split(grid.merged_columns)]
        return torch.cat([self.weights["image_start"][None], *rows, self.weights["image_end"][None]])

    def grid(self, width: int, height: int) -> Grid:
        """The grid of an image of that size."""
        return fitting_grid(self.config, width, height)

    def patches(self, image: Image.Image) -> tuple[torch.Tensor, Grid]:
        """[patches, 3 * p * p], in reading order, each channel by channel; values rounded to bfloat16."""
        patch = self.config["patch_size"]
        grid = self.grid(*image.size)
        canvas = fitted(image.convert("RGB"), grid.columns * patch, grid.rows * patch)
        bytes_ = torch.frombuffer(bytearray(canvas.tobytes()), dtype=torch.uint8)
        pixels = bytes_.view(canvas.height, canvas.width, 3).double()
        values = ((pixels / 255 - 0.5) / 0.5).bfloat16().double()
        found = [
            values[r * patch : (r + 1) * patch, c * patch : (c + 1) * patch].permute(2, 0, 1).flatten()
            for r in range(grid.rows)
            for c in range(grid.columns)
        ]
        return torch.stack(found), grid

    def tower(self, patches: torch.Tensor, grid: Grid) -> torch.Tensor:
        """[patches, dim]: every patch attends to every other of its image."""
        x = self._linear("vision.patch_embed.proj", patches)
        angles = self._angles(grid)
        for layer in range(self.config["num_hidden_layers"]):
            name = f"vision.blocks.{layer}"
            x = x + self._attention(self._norm(f"{name}.norm1", x), f"{name}.attn", angles)
            gate, up = linear(self._norm(f"{name}.norm2", x), self.weights[f"{name}.mlp.w1.weight"]).chunk(2, dim=1)
            x = x + linear(torch.nn.functional.silu(gate) * up, self.weights[f"{name}.mlp.w2.weight"])
        return self._norm("vision.norm", x)

    def align(self, x: torch.Tensor, grid: Grid) -> torch.Tensor:
        """[merged rows * merged columns, D]: squares of patches side by side, missing ones zero, channels outermost."""
        merge, dim = self.config["downsample_ratio"], x.shape[1]
        padded = torch.zeros(grid.merged_rows * merge, grid.merged_columns * merge, dim, dtype=x.dtype)
        padded[: grid.rows, : grid.columns] = x.view(grid.rows, grid.columns, dim)
        squares = [
            padded[r * merge : (r + 1) * merge, c * merge : (c + 1) * merge].flatten(0, 1).T.flatten()
            for r in range(grid.merged_rows)
            for c in range(grid.merged_columns)
        ]
        hidden = self._linear("aligner.w1", torch.stack(squares))
        exact_gelu = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
        return self._linear("aligner.w2", exact_gelu)

    def _attention(self, x: torch.Tensor, name: str, angles: torch.Tensor) -> torch.Tensor:
        heads = self.config["num_attention_heads"]
        q, k, v = self._linear(f"{name}.wqkv", x).unflatten(1, (3, heads, -1)).unbind(1)
        scores = torch.einsum("qhd,khd->hqk", _rotate(q, angles), _rotate(k, angles)) * q.shape[-1] ** -0.5
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        return self._linear(f"{name}.wo", mixed.flatten(1))

    def _angles(self, grid: Grid) -> torch.Tensor:
        """[patches, half a head]: the first half of it turns by row, the second by column."""
        half = self.config["hidden_size"] // self.config["num_attention_heads"] // 2
        speeds = [self.config["rope_theta"] ** (-i / half) for i in range(0, half, 2)]
        return torch.tensor(
            [
                [row * s for s in speeds] + [column * s for s in speeds]
                for row in range(grid.rows)
                for column in range(grid.columns)
            ],
            dtype=torch.float64,
        )

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weights[f"{name}.weight"]) + self.weights[f"{name}.bias"]

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], NORM_EPS)


def fitting_grid(config: dict[str, Any], width: float, height: float) -> Grid:
    """Small images are enlarged to `min_pixels`; large ones shrunk until their places fit the limit."""
    patch, merge, limit = (config[k] for k in ("patch_size", "downsample_ratio", "max_image_tokens"))
    if width * height < config["min_pixels"]:
        factor = math.sqrt(config["min_pixels"] / (width * height))
        width, height = int(width * factor), int(height * factor)

    def of(rows: int, columns: int) -> Grid:
        return Grid(rows, columns, math.ceil(rows / merge), math.ceil(columns / merge))

    whole = of(math.ceil(height / patch), math.ceil(width / patch))
    if whole.places <= limit:
        return whole
    # The merged grid h x w of the image's shape that uses the limit up: h * (w + 1) + 2 = limit, h / w = shape.
    shape = height / width
    w = math.sqrt((limit - 2) / shape + 0.25) - 0.5
    h = w * shape
    if w < 1:
        return of((limit - 2) // 2 * merge, merge)
    if h < 1:
        return of(merge, (limit - 3) * merge)
    cell = patch * merge
    scale = min(math.floor(w) * cell / width, math.floor(h) * cell / height)
    return of(math.floor(height * scale / patch), math.floor(width * scale / patch))


def fitted(image: Image.Image, width: int, height: int) -> Image.Image:
    """The image as large as fits into width x height in its own shape, centred on grey."""
    if image.width / image.height > width / height:
        size = (width, round(image.height / image.width * width))
    else:
        size = (round(image.width / image.height * height), height)
    canvas = Image.new("RGB", (width, height), GREY)
    if min(size) > 0:
        offset = (round((width - size[0]) / 2), round((height - size[1]) / 2))
        canvas.paste(image.resize(size, Image.Resampling.BICUBIC), offset)
    return canvas


def _rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turn each dimension of the first half of a head with its counterpart in the second; x [T, H, d]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
