"""What steps cost on this machine, from a second of dummy steps as the engine starts."""

import time
from dataclasses import dataclass
from typing import Any

from deepinfer_vllm.spec_decode.cost_table import CostTable


@dataclass(frozen=True)
class Manner:
    """seconds: tries end before so long; sizes that were not tried lie on the line of the last two that were. eager:
    steps run as vLLM profiles memory, without captured graphs."""

    seconds: float
    eager: bool


HOST = Manner(1.0, eager=True)
DEVICE = Manner(4.0, eager=False)
"""A step costs it little more time to be large."""
TRIES = 4
"""Of each size, if there is time. The fastest counts: what else a machine does only ever adds."""
FIRST = (1, 8)
"""Sizes that are tried whatever they take."""
Sample = tuple[int, int, float]
"""Tokens or requests, context tokens, seconds."""


def start_costs(runner: Any, ranks: Any, manner: Manner = HOST) -> CostTable:
    """Dummy steps of the target and the draft model, at sizes from 1 to the largest batch. Collective over `ranks`.

    They run where vLLM has its dummy steps, over blocks that nobody uses yet. Times of live steps correct what these
    leave out: sampling, and what the engine does between steps.
    """
    most = min(runner.max_num_tokens, runner.max_num_reqs * (runner.max_model_len - 1))
    captured = [] if manner.eager else _captured(runner)
    sizes = sorted({*_sizes(most), *captured})
    first = [size for size in FIRST if size <= most]
    shapes = [(size, 1) for size in first] + [(first[-1], min(4096, runner.max_model_len // 2))]
    shapes += [(size, 1) for size in sizes if size not in first]
    verify: dict[tuple[int, int], float] = {}
    draft: dict[tuple[int, int], float] = {}
    per_token_s = _step(runner, 1, 1, manner)[0]  # and whatever is set up at first use
    deadline = time.perf_counter() + manner.seconds
    for attempt in range(TRIES):
        for size, context_len in shapes:
            late = time.perf_counter() + size * per_token_s > deadline
            needed = attempt == 0 and size in FIRST and context_len == 1
            if ranks.broadcast_object(late and not needed, src=0):
                break
            target_s, draft_s, requests = _step(runner, size, context_len, manner)
            per_token_s = (target_s + draft_s) / size
            _keep_least(verify, (size, requests * context_len), target_s)
            _keep_least(draft, (requests, requests * context_len), draft_s)
    verify, draft = ranks.broadcast_object((verify, draft), src=0)
    return CostTable.measured(
        _extended(verify, sizes), _extended(draft, _sizes(runner.max_num_reqs)), padded_to=max(captured, default=0)
    )


def _sizes(most: int) -> list[int]:
    """Powers of two below `most`, and `most`."""
    return [1 << power for power in range(most.bit_length()) if 1 << power < most] + [most]


def _captured(runner: Any) -> list[int]:
    """Sizes that a batch of requests with unequal numbers of tokens is padded to."""
    graphs = getattr(runner.cudagraph_manager, "graphs", {})
    return sorted({graph.num_tokens for graph in graphs if graph.uniform_token_count is None})


def _step(runner: Any, tokens: int, context_len: int, manner: Manner) -> tuple[float, float, int]:
    """Seconds of the target over so many tokens and of the draft block, and the requests of that block.

    Each request has `context_len` tokens before its own, at least one: without, vLLM puts every token at position 0.
    """
    speculator = runner.speculator
    began = speculator.now()
    hidden, _ = runner._dummy_run(tokens, context_len=context_len, is_profile=manner.eager, randomize_inputs=True)
    runner.model.compute_logits(hidden[: runner.max_num_reqs * runner.decode_query_len])
    seconds = speculator.now() - began
    return seconds - speculator.proposal_s, speculator.proposal_s, speculator.proposed_for


def _keep_least(seconds: dict[tuple[int, int], float], shape: tuple[int, int], found: float) -> None:
    seconds[shape] = min(found, seconds.get(shape, found))


def _extended(seconds: dict[tuple[int, int], float], sizes: list[int]) -> list[Sample]:
    """With a sample for each size beyond those that were tried, so that the table can learn of each."""
    bare = {size: found for (size, context), found in seconds.items() if context <= size}
    tried = sorted(bare)
    last, before = tried[-1], tried[-2] if len(tried) > 1 else 0
    slope = max(0.0, (bare[last] - bare.get(before, 0.0)) / (last - before))
    further = [(size, 0, bare[last] + slope * (size - last)) for size in sizes if size > last]
    return [(size, context, found) for (size, context), found in seconds.items()] + further
