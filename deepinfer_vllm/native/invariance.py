"""Whether answers may depend on what else is computed beside them (`VLLM_BATCH_INVARIANT=1`: they may not), and the way
in which V4.1 keeps them from it here. The one place that decides; layers ask it.

| way | what becomes of a row | where |
|---|---|---|
| by rows | C gives it one and the same order of operations, however many there are (`invariant`) | CPU, compiler |
| by tokens | a forward pass of its own, in which every shape follows from its position | anywhere, slow |
"""

import enum


class Way(enum.Enum):
    """How a model is made batch-invariant; the value goes into the names under which rows are shared."""

    NONE = ""
    ROWS = "invariant"
    TOKENS = "invariant-tokens"


_way = Way.NONE


def way() -> Way:
    """What a model built now would do, by vLLM's variable, its platform and the compiled code."""
    import vllm.envs
    from vllm.platforms import current_platform

    if not vllm.envs.VLLM_BATCH_INVARIANT:
        return Way.NONE
    from deepinfer_vllm.native import build, invariant

    compiled = current_platform.is_cpu() and build.kernels() is not None and invariant.library() is not None
    return Way.ROWS if compiled else Way.TOKENS


def decide() -> Way:
    """Settle it for this process; a target model calls this before its layers are made."""
    global _way
    _way = way()
    return _way


def by_rows() -> bool:
    """Whether the model of this process is invariant by rows."""
    return _way is Way.ROWS


def by_tokens() -> bool:
    """Whether it is invariant by tokens."""
    return _way is Way.TOKENS


def decided() -> bool:
    """Whether it is invariant at all."""
    return _way is not Way.NONE
