"""How many tokens back each kind of row is kept, of those that are not kept for the whole request."""

from dataclasses import dataclass

from deepinfer_vllm.models.deepseek_v41.config import ModelConfig
from deepinfer_vllm.models.deepseek_v41.topology import LEGAL_RATIOS


@dataclass(frozen=True)
class Windows:
    """Tokens, the newest included. No two kinds of unequal width share a length: vLLM (0.32, 0.33) groups windows by
    length and loses layers when it splits a group of several widths. A row kept for longer changes no result."""

    rebuilt: int
    """Window rows that a prefix hit computes again."""
    attention: int
    """Window rows of the other layers, from which those are computed."""
    open_group: int
    history: int

    @classmethod
    def plan(cls, config: ModelConfig, replay_tokens: int) -> "Windows":
        """The windows when `replay_tokens` are computed again after a prefix hit."""
        rebuilt, attention = config.window, config.window + replay_tokens
        open_group = _distinct(max(LEGAL_RATIOS) + replay_tokens, {rebuilt, attention})
        ngram = 0 if config.engram is None else config.engram.max_ngram
        return cls(rebuilt, attention, open_group, _distinct(ngram + replay_tokens, {rebuilt, attention, open_group}))


def _distinct(least: int, taken: set[int]) -> int:
    return next(length for length in range(least, least + len(taken) + 1) if length not in taken)
