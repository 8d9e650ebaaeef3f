"""The implementations that `verify` drives: our modules by themselves, and vLLM's engine around them."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from deepinfer_vllm.checkpoint.bare import BareModel, Trace
from deepinfer_vllm.checkpoint.compare import padded_sets
from deepinfer_vllm.checkpoint.interface import Generation, Prefill

AnyPrompt = Sequence[int] | Mapping[str, Any]
"""Token ids, or a prompt in vLLM's own form, which may hold images."""

NUMERICS = {"plain": "plain", "qat": "qat", "bf16": "qat"}


@contextmanager
def _environment(numerics: str, *, replay: bool = False, runner: str | None = None) -> Iterator[None]:
    """Our model with the numerics asked for; vLLM in this process, quiet, its sampler not compiled."""
    quiet = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    values = {
        "DEEPINFER_VLLM_MODEL": "portable",
        "DEEPINFER_VLLM_NUMERICS": NUMERICS[numerics],
        "DEEPINFER_VLLM_DECODER_REPLAY": "1" if replay else "0",
        **{name: os.environ.get(name, value) for name, value in quiet.items()},
    }
    if runner is not None:
        values["VLLM_USE_V2_MODEL_RUNNER"] = {"V1": "0", "V2": "1"}[runner]
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        from vllm.envs import disable_envs_cache
        from vllm.plugins import load_general_plugins

        disable_envs_cache()  # an engine that ran here before has frozen its own
        load_general_plugins()
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class BareBackend:
    """The modules without an engine, with every intermediate value."""

    name = "bare"

    def __init__(self, directory: Path, dtype: str, numerics: str) -> None:
        with ExitStack() as stack:
            stack.enter_context(_environment(numerics))
            self._model = BareModel(directory, dtype=dtype)
            stack.callback(self._model.close)
            self._stack = stack.pop_all()

    def prefill(self, prompt_ids: Sequence[int]) -> Prefill:
        """See `Backend`."""
        trace = self._model.prefill(torch.tensor(prompt_ids))
        return Prefill(
            logits=trace.logits,
            hidden_states=trace.hidden_states,
            router_ids=trace.router_ids,
            engram_hash_ids=torch.stack(list(trace.engram_rows.values())) if trace.engram_rows else None,
            candidate_blocks=self._candidate_sets(trace),
            index_topk={layer: padded_sets(rows) for layer, rows in trace.index_topk.items()},
        )

    def generate(self, prompt_ids: Sequence[int], count: int) -> Generation:
        """See `Backend`."""
        ids, logits = self._model.generate(torch.tensor(prompt_ids), count)
        return Generation(ids.tolist(), logits)

    def close(self) -> None:
        """See `Backend`."""
        self._stack.close()

    def _candidate_sets(self, trace: Trace) -> list[set[int]] | None:
        """Blocks each token may choose in; a token with nothing set may choose in every block it sees."""
        if trace.candidate_blocks is None:
            return None
        config = self._model.model.config
        ratio = config.compress_ratios[config.candidate_source]
        sets = padded_sets(trace.candidate_blocks)
        seen = (-(-((position + 1) // ratio) // config.candidate_block_size) for position in range(len(sets)))
        return [blocks or set(range(count)) for blocks, count in zip(sets, seen, strict=True)]


class EngineBackend:
    """vLLM's `LLM`. Logits come as raw logprobs over the whole vocabulary, so it is for small ones."""

    name = "engine"

    def __init__(
        self,
        directory: Path,
        dtype: str,
        numerics: str,
        *,
        replay: bool = False,
        runner: str | None = None,
        **engine_args: Any,
    ) -> None:
        """`runner`: "V1" or "V2" of vLLM; None is the environment's choice."""
        with ExitStack() as stack:
            stack.enter_context(_environment(numerics, replay=replay, runner=runner))
            self._start(directory, dtype, engine_args)
            stack.callback(self._stop)
            self._stack = stack.pop_all()

    def _start(self, directory: Path, dtype: str, engine_args: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import ModelConfig

        self._vocab = ModelConfig(str(directory), skip_tokenizer_init=True).get_vocab_size()
        defaults: dict[str, Any] = {
            "enforce_eager": True,
            "kv_cache_memory_bytes": 256 << 20,
            "block_size": 32,
            "max_num_seqs": 16,
            "skip_tokenizer_init": True,
            "max_logprobs": self._vocab,
            "logprobs_mode": "raw_logits",
        }
        self._llm = LLM(str(directory), dtype=dtype, **{**defaults, **engine_args})

    def prefill(self, prompt_ids: Sequence[int]) -> Prefill:
        """See `Backend`."""
        output = self._run([prompt_ids], 1, logprobs=self._vocab, prompt_logprobs=self._vocab)[0]
        rows = [row for row in output.prompt_logprobs if row] + output.outputs[0].logprobs
        return Prefill(logits=self._logits(rows))

    def generate(self, prompt_ids: Sequence[int], count: int) -> Generation:
        """See `Backend`."""
        return self.generate_many([prompt_ids], count)[0]

    def generate_many(
        self, prompts: Sequence[AnyPrompt], count: int, *, logits: bool = True, **sampling: Any
    ) -> list[Generation]:
        """Several prompts in one batch. Without `logits` it is much faster; `sampling` goes to vLLM."""
        found = [o.outputs[0] for o in self._run(prompts, count, logprobs=self._vocab if logits else None, **sampling)]
        return [Generation(list(o.token_ids), self._logits(o.logprobs) if logits else None) for o in found]

    @property
    def scheduler(self) -> Any:
        """The engine's scheduler, for tests; the engine must run in this process."""
        return self._llm.llm_engine.engine_core.engine_core.scheduler

    def cached_tokens(self, prompt: AnyPrompt) -> int:
        """Tokens of a prompt that the prefix cache gives."""
        return int(self._run([prompt], 1)[0].num_cached_tokens or 0)

    def close(self) -> None:
        """See `Backend`."""
        self._stack.close()

    def _stop(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()
        cleanup_dist_env_and_memory()

    def _run(self, prompts: Sequence[AnyPrompt], count: int, **sampling: Any) -> Any:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, **sampling)
        given = [p if isinstance(p, Mapping) else {"prompt_token_ids": list(p)} for p in prompts]
        return self._llm.generate(given, params, use_tqdm=False)

    def _logits(self, rows: Any) -> torch.Tensor:
        return torch.tensor([[row[token].logprob for token in range(self._vocab)] for row in rows])
