"""vLLM's own schedulers over an engine that is simulated: its clock is a cost, its tokens a function of their place."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from deepinfer_costmodel.cost import Cost
from deepinfer_costmodel.step import Load, StepCost
from deepinfer_vllm.scheduling import scheduler as ours
from deepinfer_vllm.scheduling.scheduler import CostModelScheduler

CHECKPOINT = Path(__file__).resolve().parent.parent / "golden" / "v41-tiny-a"
BLOCK = 16
TRUE = StepCost(Cost(0.004, 3e-5, 2e-9), 0.003, 1e-4, 1e-8, 4e-5)


def make(
    *, cost_model: bool = True, asynchronous: bool = False, drafts: int = 0, blocks: int = 20_000, **args: Any
) -> Any:
    """A scheduler as an engine makes it; `drafts` by position, from an n-gram speculator as far as it can tell."""
    defaults = {"max_num_batched_tokens": 8192, "max_num_seqs": 64}
    config = EngineArgs(
        str(CHECKPOINT), dtype="float32", skip_tokenizer_init=True, disable_log_stats=False, **{**defaults, **args}
    ).create_engine_config()
    config.scheduler_config.async_scheduling = asynchronous
    config.cache_config.num_gpu_blocks = blocks
    config.model_config.max_model_len = 131_072  # more than the checkpoint's positions: nothing is computed
    plain = AsyncScheduler if asynchronous else Scheduler
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    made = (CostModelScheduler if cost_model else plain)(
        config,
        KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )
    assert isinstance(made, plain)
    made.num_spec_tokens = drafts
    if asynchronous:
        made._spec_token_placeholders = [-1] * drafts
    if cost_model:
        made._decode_tokens = 1 + drafts
    made.encoder_cache_manager = EncoderCacheManager(4096)
    made.max_num_encoder_input_tokens = 4096
    init_none_hash(hash)
    return made


def request(
    name: str,
    tokens: int,
    answer: int,
    *,
    images: Iterable[tuple[int, int]] = (),
    checkpoints: list[int] | None = None,
    shared: int = 0,
) -> Request:
    """A prompt of so many tokens, of which `shared` are those of all others; images: (first token, tokens)."""
    extra = {"kv_transfer_params": {"chunk_checkpoints": checkpoints}} if checkpoints is not None else None
    params = SamplingParams(max_tokens=answer, ignore_eos=True, extra_args=extra)
    params.update_from_generation_config({}, None)
    features = [
        MultiModalFeatureSpec(None, "image", f"{name}/{first}", PlaceholderRange(first, length))
        for first, length in images
    ]
    ids = [(hash(name if at >= shared else "") + at) % 500 for at in range(tokens)]
    return Request(name, ids, params, None, mm_features=features, block_hasher=get_request_block_hasher(BLOCK, _hash))


def _hash(value: Any) -> bytes:
    return hash(repr(value)).to_bytes(8, "little", signed=True)


@dataclass
class Engine:
    """Drives a scheduler as vLLM's engine core does; with async scheduling one step ahead."""

    scheduler: Any
    true: StepCost = TRUE
    noise: float = 0.0
    seed: int = 0
    now_s: float = 100.0
    steps: list[Any] = field(default_factory=list)
    """(load, seconds) as they ran."""
    chunks: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """By request: first position and tokens of each step's share."""
    encoded: list[tuple[int, int]] = field(default_factory=list)
    """Where each image begins, and where the chunk ended in whose step it was encoded."""
    answers: dict[str, list[int]] = field(default_factory=dict)
    token_times: dict[str, list[float]] = field(default_factory=dict)
    reports: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = Random(self.seed)
        self._flying: deque[tuple[Any, float, dict[str, int]]] = deque()
        self._device_free_s = self.now_s

    def clock(self) -> float:
        return self.now_s

    def add(self, *requests: Request) -> None:
        for each in requests:
            self.scheduler.add_request(each)

    def step(self) -> None:
        """One call of the engine's loop."""
        ahead = isinstance(self.scheduler, AsyncScheduler)
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            if output.total_num_scheduled_tokens:
                self._launch(output)
                if ahead and len(self._flying) < 2:
                    return
            else:
                self.scheduler.update_from_output(output, _result(output, {})) if not ahead else None
        if self._flying:
            self._finish(*self._flying.popleft())

    def run(self, most: int = 100_000) -> None:
        """Until every request is answered."""
        for _ in range(most):
            if not self.scheduler.has_requests() and not self._flying:
                return
            self.step()
        raise AssertionError(f"not done after {most} steps")

    def _launch(self, output: Any) -> None:
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        load = self._load(output, starts)
        seconds = self.true.seconds(load) * self._rng.lognormvariate(0, self.noise)
        self.steps.append((load, seconds))
        self._device_free_s = max(self._device_free_s, self.now_s) + seconds
        self._flying.append((output, self._device_free_s, starts))
        self.scheduler.get_grammar_bitmask(output)

    def _load(self, output: Any, starts: dict[str, int]) -> Load:
        load = Load()
        for name, count in output.num_scheduled_tokens.items():
            start = starts[name]
            self.chunks.setdefault(name, []).append((start, count))
            if count > 1 + self.scheduler.num_spec_tokens:
                load = load.chunk(count, start, None)
            else:
                load = load._replace(decodes=load.decodes + count, context=load.context + start)
        encoded = [
            (
                self.scheduler.requests[name].mm_features[at].mm_position,
                starts[name] + output.num_scheduled_tokens[name],
            )
            for name, inputs in output.scheduled_encoder_inputs.items()
            for at in inputs
        ]
        self.encoded += [(at.offset, end) for at, end in encoded]
        return load._replace(embeds=sum(at.length for at, _ in encoded))

    def _finish(self, output: Any, ends_s: float, starts: dict[str, int]) -> None:
        self.now_s = max(self.now_s, ends_s)
        sampled = {}
        for name, count in output.num_scheduled_tokens.items():
            known = self.scheduler.requests.get(name)
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            if known is None:
                sampled[name] = []
                continue
            reached = starts[name] + count - drafts
            sampled[name] = self._tokens(known, drafts) if reached >= known.num_prompt_tokens else []
        outputs = self.scheduler.update_from_output(output, _result(output, sampled))
        for each in outputs.values():
            self.reports.append(each.scheduler_stats and (each.scheduler_stats.kv_connector_stats or {}))
            for one in each.outputs:
                self.answers.setdefault(one.request_id, []).extend(one.new_token_ids)
                self.token_times.setdefault(one.request_id, []).append(self.now_s)
        if self.scheduler.num_spec_tokens and not isinstance(self.scheduler, AsyncScheduler):
            ids = [name for name in sampled if sampled[name] and name in self.scheduler.requests]
            drafted = [7] * self.scheduler.num_spec_tokens
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, [drafted] * len(ids)))

    def _tokens(self, known: Request, drafts: int) -> list[int]:
        at = known.num_output_tokens
        accepted = self._rng.randint(0, drafts)
        return [(hash(known.request_id) + 31 * (at + i)) % 500 for i in range(1 + accepted)]

    def intervals(self, since_s: float) -> list[float]:
        """Between two outputs of a request, from then on; sorted."""
        found = []
        for times in self.token_times.values():
            found += [b - a for a, b in zip(times, times[1:], strict=False) if a >= since_s]
        return sorted(found)


def _result(output: Any, sampled: dict[str, list[int]]) -> ModelRunnerOutput:
    names = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: at for at, name in enumerate(names)},
        sampled_token_ids=[sampled.get(name, []) for name in names],
    )


def start(monkeypatch: pytest.MonkeyPatch, scheduler: Any, **options: Any) -> Engine:
    """An engine whose clock is the scheduler's too."""
    engine = Engine(scheduler, **options)
    monkeypatch.setattr(ours, "perf_counter", engine.clock)
    return engine
