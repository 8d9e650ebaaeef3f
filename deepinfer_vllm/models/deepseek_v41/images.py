"""Images: vLLM's tower and aligner, and the span of embeddings that stands for one image in the prompt.

An image of h x w merged patches takes h * (w + 1) + 2 places: a start, h rows of w patches each closed by a newline,
and an end. The three delimiters are learned vectors. Every place carries the same token id, by which router and Engram
tell it from text; attention is causal in an image as anywhere, so vLLM may cut a prompt inside one.
"""

from typing import Any

import torch
from torch import nn
from vllm.model_executor.models.interfaces import SupportsMultiModal

from deepinfer_vllm.models.deepseek_v41.config import ModelConfig
from deepinfer_vllm.models.deepseek_v41.text_only import NoDummies, TextOnlyInfo, TextOnlyProcessor
from deepinfer_vllm.native import invariance


class SeesImages(SupportsMultiModal):
    """What makes vLLM send images to a model, for one that calls `build_tower`. Module names are the checkpoint's."""

    requires_raw_input_tokens = True
    """vLLM's switch: token ids come beside embeddings."""

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """vLLM's hook: what stands for an image in text. Raises ValueError for what is not an image."""
        if modality != "image":
            raise ValueError(f"modality {modality!r}: DeepSeek-V4.1 takes text and images only")
        from vllm.models.deepseek_v41.common.mm_preprocess import IMAGE_PLACEHOLDER

        return str(IMAGE_PLACEHOLDER)

    def get_language_model(self) -> Any:
        """vLLM's hook: text and images are one module here."""
        return self

    def build_tower(self, config: ModelConfig, vllm_config: Any) -> None:
        """Make the tower, unless the checkpoint has none or --limit-mm-per-prompt allows no image."""
        model_config = vllm_config.model_config
        if config.vision is None or not model_config.supports_multimodal_inputs:
            return
        from vllm.models.deepseek_v4.common.vision import DeepseekV4ViT

        from deepinfer_vllm.models.deepseek_v41.aligner import Aligner

        with self._mark_tower_model(vllm_config, "image"):
            self.vision = DeepseekV4ViT(model_config.hf_config).to(model_config.dtype)
            self.aligner = Aligner(model_config.hf_config).to(model_config.dtype)
        self.image_start, self.image_newline, self.image_end = (_delimiter(config.hidden_size) for _ in range(3))

    def embed_multimodal(self, **inputs: Any) -> list[torch.Tensor]:
        """vLLM's hook: the processed images of a batch to one [places, hidden] each.

        patches [P, 3, p, p] of all images in turn; vit_grid and llm_grid [images, 2], rows and columns.
        """
        if "patches" not in inputs:
            return []
        grids = inputs["vit_grid"].tolist()
        merged = inputs["llm_grid"].tolist()
        patches = inputs["patches"].to(self.image_start.device, self.aligner.w1.weight.dtype)
        parts = patches.split([rows * columns for rows, columns in grids])
        if invariance.decided():
            parts = tuple(part.clone() for part in parts)  # products may go by where memory begins
        return [
            self._span(self.aligner(self.vision(part, *grid), *grid).unflatten(0, size))
            for part, grid, size in zip(parts, grids, merged, strict=True)
        ]

    def _span(self, image: torch.Tensor) -> torch.Tensor:
        """[h, w, hidden] to [h * (w + 1) + 2, hidden]."""
        start, newline, end = (
            vector.to(image.dtype).unsqueeze(0) for vector in (self.image_start, self.image_newline, self.image_end)
        )
        lines = torch.cat([image, newline.expand(len(image), 1, -1)], dim=1).flatten(0, 1)
        return torch.cat([start, lines, end])


def _delimiter(size: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False)


def processing_info(context: Any) -> Any:
    """vLLM's hook: what may come beside the text, by the checkpoint. A text model loads nothing for images."""
    if not context.get_hf_config().vision_n_layers:
        return TextOnlyInfo(context)
    from deepinfer_vllm.models.deepseek_v41.image_processor import ImageInfo

    return ImageInfo(context)


def dummy_inputs(info: Any) -> Any:
    """vLLM's hook: the largest image, for sizing memory."""
    if isinstance(info, TextOnlyInfo):
        return NoDummies(info)
    from vllm.models.deepseek_v41.common.mm_preprocess import DeepseekV4VLDummyInputsBuilder

    return DeepseekV4VLDummyInputsBuilder(info)


def processor(info: Any, dummies: Any) -> Any:
    """vLLM's hook: what turns the images of a request into patches and places."""
    if isinstance(info, TextOnlyInfo):
        return TextOnlyProcessor(info, dummies)
    from deepinfer_vllm.models.deepseek_v41.image_processor import ImageProcessor

    return ImageProcessor(info, dummies)
