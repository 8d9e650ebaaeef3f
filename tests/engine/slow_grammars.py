"""For workers in processes of their own: all ranks but the first compile grammars late. Imported by the workers."""

from __future__ import annotations

import itertools
import time
from typing import Any

from deepinfer_vllm.spec_decode.grammar_compiler import GrammarCompiler

LATE_SECONDS, LATE_GRAMMARS = 0.2, 4

_compile = GrammarCompiler._compile
_number = itertools.count()


def compile_late(self: GrammarCompiler, params: Any) -> Any:
    from vllm.distributed.parallel_state import get_tp_group

    grammar = _compile(self, params)
    if get_tp_group().rank_in_group and next(_number) < LATE_GRAMMARS:
        time.sleep(LATE_SECONDS)
    return grammar


GrammarCompiler._compile = compile_late  # type: ignore[method-assign]


class SlowGrammars:
    """A worker extension."""

    model_runner: Any

    def grammar_counts(self) -> tuple[int, int, int]:
        """Drafts masked, blocks that were not, and requests that never were."""
        grammar = self.model_runner.speculator.grammar
        return grammar.masked_drafts, grammar.requests.unready_blocks, grammar.requests.unmasked
