"""vLLM's engine in this process, driven step by step so that each step's time is known."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class StepTime:
    """One engine step."""

    seconds: float
    experts: int
    """(layer, expert) pairs that its tokens were routed to."""


class Engine:
    """A loaded model behind vLLM's scheduler, no prefix cache, chunks of `chunk` tokens."""

    def __init__(self, directory: Path, dtype: str, *, chunk: int, max_tokens: int) -> None:
        os.environ.update(
            DEEPINFER_VLLM_MODEL="portable", VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCH_COMPILE_DISABLE="1"
        )
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import LLM

        self._llm = LLM(
            str(directory),
            dtype=dtype,
            enforce_eager=True,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            max_model_len=max_tokens,
            max_num_batched_tokens=chunk,
            max_num_seqs=8,
            block_size=32,
            kv_cache_memory_bytes=1 << 30,
        )
        self._engine = self._llm.llm_engine
        self._engine.step()  # nothing to do; the first call sets things up
        self._model = self._engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
        self._routed: list[torch.Tensor] = []
        for layer in self._model.layers:
            layer.ffn.experts.register_forward_pre_hook(lambda _, inputs: self._routed.append(inputs[1]))
        self._requests = 0

    @property
    def replay(self) -> bool:
        """Whether prefills skip rows past the last KV source. Set it between requests."""
        return bool(self._model.replay)

    @replay.setter
    def replay(self, on: bool) -> None:
        self._model.replay = on

    def prefill(self, prompt: list[int]) -> list[float]:
        """Seconds of each step from the prompt's arrival to its first token."""
        self._add(prompt, 1)
        return [step.seconds for step in self._steps()]

    def decode(self, prompts: list[list[int]], count: int) -> Iterator[StepTime]:
        """Steps that give each of the prompts one token, at most `count` of them, prefill excluded."""
        for prompt in prompts:
            self._add(prompt, count + len(prompts) + 1)
        waiting = set(range(self._requests - len(prompts), self._requests))
        while waiting:
            self._routed.clear()
            waiting -= {int(output.request_id) for output in self._engine.step() if output.outputs[0].token_ids}
        steps = self._steps()
        for _, step in zip(range(count), steps, strict=False):
            yield step
        self._engine.abort_request([str(n) for n in range(self._requests - len(prompts), self._requests)])
        for _ in steps:
            pass

    def _add(self, prompt: list[int], count: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        self._engine.add_request(str(self._requests), {"prompt_token_ids": prompt}, params)
        self._requests += 1

    def _steps(self) -> Iterator[StepTime]:
        while self._engine.has_unfinished_requests():
            self._routed.clear()
            start = time.perf_counter()
            self._engine.step()
            seconds = time.perf_counter() - start
            yield StepTime(seconds, sum(len(experts.unique()) for experts in self._routed))
