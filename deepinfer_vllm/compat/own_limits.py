"""Top-k and top-p row by row: vLLM takes one way for a whole batch, which shows in logprobs of what was cut off."""

import functools
import importlib
import itertools
from typing import Any


def limit_rows_by_themselves() -> None:
    """Where answers must not depend on the batch, apply to a row of logits the limits that its request asked for only.

    vLLM sorts and sums up every row if one of the batch has a top-p. A row that has none then loses the tokens whose
    probability is 0 in float32: with `--logprobs-mode processed_logprobs` they are listed as impossible. On a GPU its
    kernel is another for each combination of limits. Called as such a model is built.
    """
    sampler = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")
    apply = sampler.apply_top_k_top_p
    if hasattr(apply, "deepinfer_hooked"):
        return

    @functools.wraps(apply)
    def apply_to_each(logits: Any, k: Any, p: Any, *args: Any, **kwargs: Any) -> Any:
        from deepinfer_vllm.native import invariance

        if not invariance.decided():
            return apply(logits, k, p, *args, **kwargs)
        none = logits.new_zeros(len(logits), dtype=bool)
        has_k, has_p = (none if k is None else k < logits.shape[-1]), (none if p is None else p < 1)
        for with_k, with_p in itertools.product((False, True), repeat=2):
            rows = ((has_k == with_k) & (has_p == with_p)).nonzero().flatten()
            if len(rows) and (with_k or with_p):
                logits[rows] = apply(logits[rows], k[rows] if with_k else None, p[rows] if with_p else None)
        return logits

    apply_to_each.deepinfer_hooked = True  # type: ignore[attr-defined]
    for name in ("sample.ops.topk_topp_sampler", "worker.gpu.sample.states", "worker.gpu.sample.sampler"):
        module: Any = importlib.import_module(f"vllm.v1.{name}")
        module.apply_top_k_top_p = apply_to_each
