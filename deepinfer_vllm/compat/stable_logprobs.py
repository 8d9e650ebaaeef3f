"""Which of equally likely tokens are listed with an answer: vLLM has it depend on what else is in the batch."""

import functools
import importlib
from collections.abc import Callable
from typing import Any


def list_lower_ids_first() -> None:
    """Where answers must not depend on the batch, list equal logprobs by token id. vLLM ranks every row for the largest
    number of logprobs that a request of the batch wants, and `torch.topk` breaks ties in another way for each number.

    Called as such a model is built.
    """
    from vllm.v1.sample.sampler import Sampler

    scores = importlib.import_module("vllm.v1.worker.gpu.sample.logprob").compute_topk_scores
    if hasattr(scores, "deepinfer_hooked"):
        return
    stable = _stable(scores)
    for name in ("sample.logprob", "sample.sampler", "sample.prompt_logprob", "spec_decode.rejection_sampler"):
        module: Any = importlib.import_module(f"vllm.v1.worker.gpu.{name}")
        module.compute_topk_scores = stable
    Sampler.gather_logprobs = staticmethod(_stable(Sampler.gather_logprobs))


def _stable(function: Callable[..., Any]) -> Callable[..., Any]:
    import torch
    from torch.overrides import TorchFunctionMode

    from deepinfer_vllm.models.deepseek_v41.topk import stable_topk
    from deepinfer_vllm.native import invariance

    class Stable(TorchFunctionMode):
        """torch.topk over rows, by value and then by index."""

        def __torch_function__(self, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if called is torch.topk:
                rows, k = args
                indices = stable_topk(rows.float(), k, in_order=True)
                return torch.return_types.topk((rows.gather(-1, indices), indices))
            return called(*args, **kwargs or {})

    @functools.wraps(function)
    def stable(*args: Any, **kwargs: Any) -> Any:
        if not invariance.decided():
            return function(*args, **kwargs)
        with Stable():
            return function(*args, **kwargs)

    stable.deepinfer_hooked = True  # type: ignore[attr-defined]
    return stable
