"""For vLLM, which asks the class and not the checkpoint whether it takes images: how a text checkpoint takes none.

A request with an image reaches the processor's count of what is allowed, which is 0, and is answered with status 400.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo


class TextOnlyInfo(BaseProcessingInfo):
    """Nothing may come beside the text."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """vLLM's hook."""
        return {}


class NoDummies(BaseDummyInputsBuilder):
    """Nothing to size memory by."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        """vLLM's hook."""
        return ""

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> Mapping[str, Any]:
        """vLLM's hook."""
        return {}


class TextOnlyProcessor(BaseMultiModalProcessor):
    """Counts, and processes nothing."""

    requires_tokenizer = False

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> Mapping[str, Any]:
        return {}

    def _get_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any) -> Sequence[Any]:
        return []
