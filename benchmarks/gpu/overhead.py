"""What deciding about drafts costs the host, a step: the whole verifier on a device's queue of work, without a model.

A step here is everything that the runner calls of it, with confidences drawn at random and as many requests as said.

Example: python benchmarks/gpu/overhead.py --device cuda --requests 16 256 --out overhead.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

POSITIONS, WARM = 5, 100


def verifier(requests: int, device: torch.device) -> Any:
    """As an engine has it, decided ahead."""
    from deepinfer_vllm.spec_decode.arrivals import queue_of
    from deepinfer_vllm.spec_decode.controller import Controller
    from deepinfer_vllm.spec_decode.cost_table import CostTable
    from deepinfer_vllm.spec_decode.delayed_verifier import DelayedVerifier
    from deepinfer_vllm.spec_decode.device_times import DeviceTimes
    from deepinfer_vllm.spec_decode.settings import Settings
    from deepinfer_vllm.spec_decode.shared_times import SharedTimes
    from deepinfer_vllm.spec_decode.stats import DraftStats

    sizes = [1 << power for power in range(13)]
    costs = CostTable.measured([(n, 0, 0.02 + 4e-5 * n) for n in sizes], [(1, 0, 0.001), (requests, 0, 0.002)])
    controller = Controller(None, costs, Settings("delayed", "off", "", True))
    states = SimpleNamespace(
        num_speculative_steps=POSITIONS,
        max_num_reqs=requests,
        req_id_to_index={f"request-{number}": number for number in range(requests)},
        num_computed_tokens_np=np.full(requests, 100),
        prefill_len=SimpleNamespace(np=np.full(requests, 100)),
    )
    probabilities = torch.rand(requests, POSITIONS, device=device) * 0.4 + 0.6
    speculator = SimpleNamespace(drafting=True, draft_token_confidence_probs=probabilities)
    starts = torch.zeros(requests + 1, dtype=torch.int32, device=device)
    times, queue = DeviceTimes(SharedTimes(controller)), queue_of(device, requests)
    made = DelayedVerifier(
        controller,
        times,
        queue,
        speculator,
        states,
        starts,
        1,
        lambda tokens, *_: list(tokens),
        wait=False,
    )
    made.stats = DraftStats(POSITIONS)
    controller.wants_drafts = lambda *_: True
    return made


def step(made: Any, batch: Any, sampled: torch.Tensor) -> float:
    """Everything that a step of the runner calls; seconds of that before the device has the step."""
    begin = time.perf_counter()
    made.began(usual=True, idle=False)
    made.get_num_tokens(batch.tokens, batch.draft_tokens)
    made.compact_batch(batch.num_draft_tokens_per_req, batch.num_scheduled_tokens, None)
    made.reallocate_drafts(batch.req_ids, None)
    before = time.perf_counter() - begin
    made.verified(sampled)
    made.wants_drafts(batch)
    made.drafted(batch)
    made.stats.take()
    return before


def measured(requests: int, device: torch.device, steps: int) -> dict[str, Any]:
    """Microseconds of a step on the host's thread."""
    made = verifier(requests, device)
    ids = list(made._states.req_id_to_index)
    batch = SimpleNamespace(
        req_ids=ids,
        num_reqs=requests,
        num_tokens=6 * requests,
        tokens=dict.fromkeys(ids, 1 + POSITIONS),
        draft_tokens={name: [-1] * POSITIONS for name in ids},
        idx_mapping_np=np.arange(requests),
        num_draft_tokens_per_req=np.full(requests, POSITIONS, np.int32),
        num_scheduled_tokens=np.full(requests, 1 + POSITIONS, np.int32),
        num_computed_tokens_np=np.full(requests, 100, np.int32),
        prefill_len_np=np.full(requests, 100, np.int32),
    )
    for slot in range(requests):
        made.add_request(slot)
    sampled = torch.randint(1, 2 + POSITIONS, (requests,), device=device, dtype=torch.int32)
    found, before = [], []
    for number in range(WARM + steps):
        begin = time.perf_counter()
        ahead = step(made, batch, sampled)
        if number >= WARM:
            found.append(1e6 * (time.perf_counter() - begin))
            before.append(1e6 * ahead)
    return {"before the device has the step": quantiles(before), "all": quantiles(found)}


def quantiles(microseconds: list[float]) -> dict[str, float]:
    """The least, the median and the ninth tenth."""
    ordered = sorted(microseconds)
    return {name: ordered[int(part * len(ordered))] for name, part in (("least", 0), ("median", 0.5), ("p90", 0.9))}


def main() -> None:
    """Measure each number of requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64, 256], help="default: 1 16 64 256")
    parser.add_argument("--steps", type=int, default=1000, help="default: 1000")
    parser.add_argument("--out", type=Path, help="a JSON file")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for requests in args.requests:
        results[str(requests)] = measured(requests, torch.device(args.device), args.steps)
        print(f"{requests} requests: {results[str(requests)]}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
