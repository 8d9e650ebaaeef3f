"""vLLM's V4.1 image processing, for any image token id and with or without a tokenizer.

vLLM's classes are made for the release's id; the sizes, the patches and the cache of processed images are theirs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.models.deepseek_v41.common.mm_preprocess import (
    IMAGE_PLACEHOLDER,
    DeepseekV4VLDummyInputsBuilder,
    DeepseekV4VLMultiModalProcessor,
    DeepseekV4VLProcessingInfo,
)
from vllm.multimodal.processing import PromptReplacement, PromptUpdateDetails
from vllm.multimodal.processing.inputs import ProcessorInputs

from deepinfer_vllm.models.deepseek_v41.config import ConfigError


class ImageInfo(DeepseekV4VLProcessingInfo):
    """What vLLM asks about images before it has one."""

    def get_image_placeholder_token_id(self) -> int:
        """The id by which a prompt names an image, and which every place of it carries."""
        return int(self.get_hf_config().image_token_id)


class ImageProcessor(DeepseekV4VLMultiModalProcessor):
    """Images to patches, and one placeholder token to all places of its image."""

    requires_tokenizer = False  # prompts may come as token ids

    def __init__(self, info: ImageInfo, dummies: DeepseekV4VLDummyInputsBuilder) -> None:
        super().__init__(info, dummies)
        tokenizer, expected = info.ctx.tokenizer, info.get_image_placeholder_token_id()
        found = expected if tokenizer is None else tokenizer.convert_tokens_to_ids(IMAGE_PLACEHOLDER)
        if found != expected:
            limit = f"the tokenizer's id of {IMAGE_PLACEHOLDER} is {found}"
            raise ConfigError("image_token_id", expected, limit, "Use the release's own tokenizer and config.json")

    def get_dummy_inputs(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> ProcessorInputs:
        """vLLM's hook: as many of the largest images as `mm_counts` says."""
        images = self.dummy_inputs.get_dummy_mm_data(seq_len, mm_counts, mm_options)
        prompt = [self.info.get_image_placeholder_token_id()] * mm_counts.get("image", 0)
        return ProcessorInputs(prompt=prompt, mm_data_items=self.info.parse_mm_data(images, validate=False))

    def _get_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any) -> Sequence[Any]:
        image = self.info.get_image_placeholder_token_id()

        def places(index: int) -> Any:
            count = out_mm_kwargs["image"][index]["types"].data.numel()
            return PromptUpdateDetails.select_token_id([image] * count, image)

        return [PromptReplacement(modality="image", target=[image], replacement=places)]
