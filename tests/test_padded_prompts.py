"""Prompt logprobs of prompts that vLLM padded with drafts to come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_vllm import compat


def test_rows_of_padding_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of one token, padded or not, have none; others keep theirs."""
    compat.provide_torch_kernels()
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

    def rows(count: int) -> Any:
        ids = torch.arange(2 * count).view(count, 2)
        return LogprobsTensors(ids, -ids.float(), ids[:, 0])

    def computed(self: Any, *_: Any) -> dict[str, Any]:
        return {"padded": rows(5), "whole": rows(6)} if self else {}

    monkeypatch.setattr(PromptLogprobsWorker, "compute_prompt_logprobs", computed)
    compat.drop_logprobs_of_padding()
    compute: Any = PromptLogprobsWorker.compute_prompt_logprobs
    batch = SimpleNamespace(req_ids=["whole", "decoding", "padded"], idx_mapping_np=np.array([2, 1, 0]))
    found = compute(True, None, None, batch, None, None, np.array([1, 9, 7]))
    assert found.keys() == {"whole"} and all(map(torch.equal, found["whole"][:3], rows(6)[:3]))
    found = compute(True, None, None, batch, None, None, np.array([3, 9, 7]))
    assert all(map(torch.equal, found["padded"][:3], [part[:2] for part in rows(5)[:3]]))
    assert compute(False, None, None, batch, None, None, np.array([1, 9, 7])) == {}
    compat.drop_logprobs_of_padding()
    assert PromptLogprobsWorker.compute_prompt_logprobs is compute
