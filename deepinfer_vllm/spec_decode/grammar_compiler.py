"""Grammars for the drafting side, compiled beside the steps as the engine core compiles its own."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

BACKEND = "xgrammar"
"""The only one of vLLM's backends whose grammars can be followed here."""

PENDING, READY, FAILED = 1, 2, 0
"""How a grammar's compilation stands. Of several ranks' the least counts."""


class GrammarCompiler:
    """Compiles with vLLM's own backend, so that its options and the tokenizer are the engine's.

    One thread, started with the first grammar. A grammar asked for again comes from the backend's cache, which forgets
    the least recently used beyond VLLM_XGRAMMAR_CACHE_MB: requests share what is compiled, and each has its own state.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._config = vllm_config
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="draft-grammars")
        self._backend: XgrammarBackend | None = None

    def submit(self, params: SamplingParams) -> Future[StructuredOutputGrammar]:
        """Start compiling the grammar of a request with structured outputs, whose backend must be BACKEND."""
        return self._thread.submit(self._compile, params)

    def _compile(self, params: SamplingParams) -> StructuredOutputGrammar:
        from vllm.v1.structured_output.request import get_structured_output_key

        if self._backend is None:
            from vllm.tokenizers import cached_tokenizer_from_config
            from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

            model = self._config.model_config
            self._backend = XgrammarBackend(self._config, cached_tokenizer_from_config(model), model.get_vocab_size())
        assert params.structured_outputs is not None
        key = get_structured_output_key(params.structured_outputs)
        return self._backend.compile_grammar(*key, stop_token_ids=params.all_stop_token_ids)


def stand(compiling: Future[StructuredOutputGrammar]) -> int:
    """PENDING, READY or FAILED."""
    if not compiling.done():
        return PENDING
    return FAILED if compiling.exception() else READY


def agreed(stands: list[int]) -> list[int]:
    """What all tensor-parallel ranks hold of the same list of compilations: ranks that differ would draft differently.

    Every rank calls it at the same point with a list of one length; a few bytes go over the host.
    """
    import torch
    from vllm.distributed.parallel_state import get_tp_group

    least = torch.tensor(stands)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=get_tp_group().cpu_group)
    return [int(value) for value in least]
