"""How far one request's grammar has come, on the side that drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar


class GrammarState:
    """A request's grammar after its output so far, and for a while after drafts that may be taken back.

    Not safe to share between threads. A grammar that has ended, or that the output does not fit, allows nothing more
    and `fill` says so.
    """

    def __init__(self, grammar: StructuredOutputGrammar) -> None:
        """`grammar` at its beginning; the state owns it."""
        self._grammar = grammar
        self._output: list[int] = []
        self._drafts = 0
        self._fits = True

    @property
    def followed(self) -> int:
        """Output tokens it has seen."""
        return len(self._output)

    def follow(self, tokens: Sequence[int]) -> bool:
        """Take back the drafts and go on by output tokens; what comes after the grammar's end does not matter.

        False when the output does not fit the grammar: that is then without effect until `resume` rewinds it.
        """
        self.take_back()
        self._output += tokens
        if self._fits and tokens and not self._grammar.is_terminated():
            fitting = self._grammar.validate_tokens(list(tokens))
            self._grammar.accept_tokens("", fitting)
            self._fits = len(fitting) == len(tokens) or self._grammar.is_terminated()
        return self._fits

    def resume(self, output: Sequence[int]) -> None:
        """The request starts again after `output`, which as a rule begins with what was followed, or is rewound to."""
        self.take_back()
        if list(output[: len(self._output)]) != self._output:
            self._grammar.reset()
            self._output, self._fits = [], True

    def fits(self, tokens: Sequence[int]) -> bool:
        """Whether the grammar can go on by all of these tokens."""
        return self._fits and self._grammar.validate_tokens(list(tokens)) == list(tokens)

    def fill(self, bitmask: torch.Tensor, row: int) -> bool:
        """Write the tokens that may come next to a row of `bitmask` [rows, words], int32 on the host, a bit a token,
        lowest first. False, and the row is left alone, when the grammar says nothing more."""
        if not self._fits or self._grammar.is_terminated():
            return False
        self._grammar.fill_bitmask(bitmask, row)
        return True

    def draft(self, token: int) -> None:
        """Go on by a draft that `fill` allowed, until it is taken back."""
        if self._grammar.accept_tokens("", [token]):
            self._drafts += 1
        else:
            self._fits = False

    def take_back(self) -> None:
        """Undo every draft since the last output token."""
        if self._drafts:
            self._grammar.rollback(self._drafts)
            self._drafts = 0
