"""DSpark of a model that is not V4.1, with and without a confidence head: the target's answers, and a budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer_vllm.checkpoint.backends import EngineBackend
from deepinfer_vllm.spec_decode.verifier import UNKNOWN
from engine.qwen3_dspark import write_pair
from engine.whims import runner_of, whims

PROMPTS = [[5, 6, 7, 8], list(range(10, 60))]


@pytest.mark.parametrize("confidence_head", [True, False])
def test_answers_are_the_targets(tmp_path: Path, confidence_head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    target, draft = write_pair(tmp_path, confidence_head=confidence_head)
    answers = []
    for speculative in (None, {"method": "dspark", "model": str(draft), "num_speculative_tokens": 5}):
        backend = EngineBackend(target, "float32", "plain", speculative_config=speculative, max_num_batched_tokens=128)
        try:
            answers.append([f.ids for f in backend.generate_many(PROMPTS, 24, logits=False)])
            if speculative is not None:
                verifier = runner_of(backend).deepinfer_verifier
                assert ((verifier._confidences == UNKNOWN).all()) is not confidence_head
                with whims(backend) as dice:
                    answers.append([f.ids for f in backend.generate_many(PROMPTS, 24, logits=False)])
                assert dice.plans
        finally:
            backend.close()
    assert answers[1] == answers[0] and answers[2] == answers[0]
