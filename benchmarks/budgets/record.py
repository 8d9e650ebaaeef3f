"""Records the blocks of a CPU engine at every place of its answers: see `budgets/recorded.py`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from budgets.curves import POSITIONS
from budgets.recorded import standing, write

PROMPT_TOKENS = 64


class Everywhere:
    """In place of a controller: drafts in every step, and verifies nothing."""

    def __init__(self, controller: Any) -> None:
        self.settings, self.costs = controller.settings, controller.costs

    def plan(self, confidences: Any, scheduled: Any, *sizes: int) -> Any:
        """None of the drafts, and draft again."""
        from deepinfer_vllm.spec_decode.controller import Plan

        return Plan(np.zeros_like(scheduled), 1.0, True)

    def wants_drafts(self, *sizes: int) -> bool:
        """Always."""
        return True

    def ignored(self, *told: Any) -> None:
        """Nothing is learnt."""

    verified = observe_verify = observe_plain = observe_draft = came = ignored


def record(path: Path, texts: int, tokens: int, made: dict[str, Any]) -> None:
    """Write the blocks of greedy answers of so many tokens to held-out prompts, all kinds of text in turn.

    Sets environment variables of vLLM: for a process of its own, which takes a minute or two.
    """
    os.environ |= {
        "DEEPINFER_VLLM_MODEL": "portable",
        "DEEPINFER_VLLM_DSPARK_BUDGET": "early-stop",
        "DEEPINFER_VLLM_DSPARK_CALIBRATION": "off",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    from vllm import LLM, SamplingParams

    from deepinfer_vllm.training.prompts import held_out_prompts
    from deepinfer_vllm.training.shipped import write_trained

    with tempfile.TemporaryDirectory() as scratch:
        directory = write_trained(Path(scratch) / "pair", dtype="float32").directory
        llm = LLM(
            str(directory),
            dtype="float32",
            enforce_eager=True,
            kv_cache_memory_bytes=256 << 20,
            block_size=32,
            max_num_seqs=16,
            max_model_len=1024,
            enable_prefix_caching=False,
            speculative_config={"method": "dspark", "num_speculative_tokens": POSITIONS},
        )
        blocks = watch(llm)
        params = SamplingParams(temperature=0, max_tokens=tokens + POSITIONS, ignore_eos=True)
        prompts = [prompt["prompt"] for prompt in held_out_prompts(texts, tokens=PROMPT_TOKENS)]
        outputs = llm.generate(prompts, params)
    found = []
    for output in outputs:
        drafted = blocks[output.request_id]
        stood = standing([block for block, _ in drafted], list(output.outputs[0].token_ids))
        found.append((np.array([said for _, said in drafted[: len(stood)]]), np.array(stood)))
    write(path, found, made)


def watch(llm: Any) -> dict[str, list[tuple[list[int], list[float]]]]:
    """Tokens and confidences of each block that the engine in this process drafts from now on, by request; nothing is
    verified any more."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    verifier, speculator = runner.deepinfer_verifier, runner.speculator
    verifier.controller, recorded = Everywhere(verifier.controller), verifier.record_confidences
    blocks: dict[str, list[tuple[list[int], list[float]]]] = {}

    def keep(confidences: Any, batch: Any) -> None:
        drafts, said = speculator.draft_tokens[: batch.num_reqs].tolist(), confidences[: batch.num_reqs].tolist()
        for row in np.flatnonzero(verifier._sampled > 0):
            name = batch.req_ids[row].rsplit("-", 1)[0]  # vLLM appends to a request's name
            blocks.setdefault(name, []).append((drafts[row], said[row]))
        recorded(confidences, batch)

    verifier.record_confidences = keep
    return blocks
