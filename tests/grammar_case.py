"""Requests with structured outputs as a worker meets them, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deepinfer_vllm.spec_decode.grammar_drafts import GrammarDrafts

STEPS = 4
WAIT_SECONDS = 60


def engine_config(directory: Path, **more: Any) -> Any:
    """vLLM's configuration of a DSpark engine on a small checkpoint made in `directory`."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    from deepinfer_vllm.checkpoint.create import create

    if not directory.exists():
        create(directory, layers=4, shards=1, dtype="float32")
    load_general_plugins()
    speculative = {"method": "dspark", "num_speculative_tokens": STEPS}
    args = EngineArgs(model=str(directory), max_num_seqs=4, speculative_config=speculative, enforce_eager=True, **more)
    return args.create_engine_config()


def structured(tokenizer: Any, backend: str = "xgrammar", **constraint: Any) -> Any:
    """Sampling parameters as they reach a worker: validated, with the backend chosen."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    outputs = StructuredOutputsParams(**constraint)
    params = SamplingParams(temperature=0, structured_outputs=outputs)
    params.update_from_generation_config({}, tokenizer.eos_token_id)
    if backend == "xgrammar":
        validate_xgrammar_grammar(params)
    outputs._backend = backend
    return params


class Column:
    """What `RequestState` keeps of a kind, in plain memory."""

    def __init__(self, gpu: torch.Tensor) -> None:
        self.gpu = gpu


@dataclass
class Worker:
    """The part of runner V2 that GrammarDrafts sees: who is in which slot, and everybody's tokens."""

    drafts: GrammarDrafts
    req_id_to_index: dict[str, int] = field(default_factory=dict)
    all_token_ids: Column = field(default_factory=lambda: Column(torch.zeros(4, 256, dtype=torch.int32)))
    total_len: Column = field(default_factory=lambda: Column(torch.zeros(4, dtype=torch.int32)))

    @property
    def index_to_req_id(self) -> dict[int, str]:
        return {slot: name for name, slot in self.req_id_to_index.items()}

    def add(self, name: str, slot: int, params: Any, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        from vllm.v1.core.sched.output import NewRequestData

        self.req_id_to_index[name] = slot
        self.total_len.gpu[slot] = len(prompt) + len(output)
        self.all_token_ids.gpu[slot, : len(prompt) + len(output)] = torch.tensor([*prompt, *output])
        new = NewRequestData(name, list(prompt), [], params, None, ([],), 0, None, prefill_token_ids=[*prompt, *output])
        self.drafts.requests.add([new], self)  # type: ignore[arg-type]

    def emit(self, name: str, tokens: Sequence[int]) -> None:
        """The target's step: tokens after those the request has."""
        slot, length = self.req_id_to_index[name], int(self.total_len.gpu[self.req_id_to_index[name]])
        self.all_token_ids.gpu[slot, length : length + len(tokens)] = torch.tensor(list(tokens))
        self.total_len.gpu[slot] += len(tokens)

    def compiled(self, name: str) -> None:
        """Wait for a request's grammar, whatever became of it."""
        self.drafts.requests._requests[name].compiling.exception(WAIT_SECONDS)

    def draft(self, names: Sequence[str | None], logits: torch.Tensor) -> tuple[list[list[int]], list[torch.Tensor]]:
        """Greedy drafts [R][STEPS] from logits [R, STEPS, vocabulary] and, of every step, the masked logits."""
        slots = torch.tensor([-1 if name is None else self.req_id_to_index[name] for name in names])
        columns, masked = [], []
        for step in range(STEPS):
            masked.append(logits[:, step].clone())
            self.drafts.mask(step, masked[-1], slots)
            columns.append(masked[-1].argmax(-1))
            self.drafts.drafted(step, columns[-1])
        return torch.stack(columns, 1).tolist(), masked
