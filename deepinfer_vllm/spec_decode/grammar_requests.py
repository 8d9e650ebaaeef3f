"""The requests of a worker that have a grammar, and how far each grammar has come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger

from deepinfer_vllm.spec_decode.grammar_compiler import BACKEND, FAILED, READY, GrammarCompiler, agreed, stand
from deepinfer_vllm.spec_decode.grammar_start import GrammarStart, first_masks
from deepinfer_vllm.spec_decode.grammar_state import GrammarState

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import GrammarOutput, NewRequestData
    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
    from vllm.v1.worker.gpu.states import RequestState

logger = init_logger("vllm." + __name__)


@dataclass
class _Request:
    prompt_tokens: int
    compiling: Future[StructuredOutputGrammar]
    start: int | None
    """Which output token is the grammar's first; None while that is not known."""
    search: GrammarStart = field(default_factory=GrammarStart)
    state: GrammarState | None = None


class GrammarRequests:
    """Requests with structured outputs, from the first step that has them to the last.

    All of it runs on the thread of the model's steps, only compilation beside it. Every tensor-parallel rank goes
    through the same calls and so comes to the same states.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.unready_blocks = 0
        """Blocks, one request's drafts of one step, without a state: its grammar was still being compiled, or the model
        still reasoned."""
        self.unmasked = 0
        """Requests of another backend, or whose grammar did not compile, or did not fit their output."""
        self._compiler = GrammarCompiler(vllm_config)
        self._ranks = vllm_config.parallel_config.tensor_parallel_size
        self._mask_rows = vllm_config.num_speculative_tokens + 1
        outputs = vllm_config.structured_outputs_config
        self._reasons = bool(outputs.reasoning_parser) and not outputs.enable_in_reasoning
        self._requests: dict[str, _Request] = {}
        self._left: set[str] = set()
        self._states: RequestState | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, requests: Iterable[NewRequestData], states: RequestState) -> None:
        """Requests that come to the worker, or come again after a preemption; `states` has their tokens."""
        for new in requests:
            params = new.sampling_params
            outputs = params and params.structured_outputs
            if params is None or not outputs or outputs.all_constraints_none() or new.req_id in self._left:
                continue
            self._states = states
            known = self._requests.get(new.req_id)
            if known is not None and known.prompt_tokens == new.prompt_len:
                if known.state is not None and known.start is not None:
                    known.state.resume((new.prefill_token_ids or [])[new.prompt_len + known.start :])
            elif outputs._backend != BACKEND:
                self._leave(new.req_id, f"their backend is {outputs._backend}, not {BACKEND}")
            else:
                start = None if self._reasons else 0
                self._requests[new.req_id] = _Request(new.prompt_len, self._compiler.submit(params), start)

    def finish(self, names: Iterable[str]) -> None:
        """Forget requests by their ids, also such as were aborted while their grammar compiled."""
        for name in names:
            if (request := self._requests.pop(name, None)) is not None:
                request.compiling.cancel()
            self._left.discard(name)

    def see_masks(self, output: GrammarOutput | None, drafts: Mapping[str, Sequence[int]]) -> None:
        """The engine's masks of this step, before it samples, and the scheduled drafts they are for.

        They tell when a request has stopped reasoning; an engine that does not reason need not call it.
        """
        if output is None or not self._reasons or self._states is None:
            return
        for name, mask in first_masks(output, drafts, self._mask_rows).items():
            request, slot = self._requests.get(name), self._states.req_id_to_index.get(name)
            if request is not None and request.start is None and slot is not None:
                request.search.observe(int(self._states.total_len.gpu[slot]) - request.prompt_tokens, mask)

    def states(self, slots: torch.Tensor) -> dict[int, GrammarState]:
        """By row of a batch, whose requests are at `slots` [R] of the worker's request state (-1 is none), the grammars
        that are ready, each brought to the end of its request's output."""
        if self._states is None:
            return {}
        names = [self._states.index_to_req_id.get(slot, "") for slot in slots.tolist()]
        batch = [(row, name) for row, name in enumerate(names) if name in self._requests]
        if not batch:
            return {}
        self._settle([name for _, name in batch])
        totals = self._states.total_len.gpu[slots].tolist()
        states = {row: self._followed(name, totals[row]) for row, name in batch}
        return {row: state for row, state in states.items() if state is not None}

    def _settle(self, names: list[str]) -> None:
        """Take over the grammars that every rank has compiled."""
        pending = [name for name in names if self._requests[name].state is None]
        if not pending:
            return
        stands = [stand(self._requests[name].compiling) for name in pending]
        for name, how in zip(pending, agreed(stands) if self._ranks > 1 else stands, strict=True):
            if how == READY:
                self._requests[name].state = GrammarState(self._requests[name].compiling.result())
            elif how == FAILED:
                self._leave(name, "a grammar that the engine follows did not compile")

    def _followed(self, name: str, total: int) -> GrammarState | None:
        """The state of a request of `total` tokens; None without one."""
        assert self._states is not None
        request = self._requests.get(name)
        if request is None:
            return None
        tokens = self._states.all_token_ids.gpu[self._states.req_id_to_index[name]]
        if request.state is not None and request.start is None:
            request.start = request.search.locate(request.state, tokens[request.prompt_tokens : total].tolist())
        if request.state is None or request.start is None:
            self.unready_blocks += 1
            return None
        seen = request.prompt_tokens + request.start + request.state.followed
        if request.state.follow(tokens[seen:total].tolist()):
            return request.state
        self._leave(name, "a grammar is not the one that the engine follows")
        return None

    def _leave(self, name: str, why: str) -> None:
        self._requests.pop(name, None)
        self._left.add(name)
        self.unmasked += 1
        logger.warning_once("Drafts of some requests are not masked by their grammar, so fewer may stand: %s.", why)
