"""What stands beside one of vLLM's EPLB states: loads step by step, what they say, and who wants to know.

`compat.eplb` calls it where vLLM's state is called.
"""

import logging
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from deepinfer_vllm.eplb.agreement import Agreement
from deepinfer_vllm.eplb.moves import moved_experts
from deepinfer_vllm.eplb.on_host import OnHost
from deepinfer_vllm.eplb.recorder import Recorder, step_limit
from deepinfer_vllm.eplb.stats import BalanceStats
from deepinfer_vllm.eplb.step_counts import StepCounts
from deepinfer_vllm.eplb.vllm_policy import StepPolicy
from deepinfer_vllm.eplb.watchdog import Watchdog

LB_STEPS = 128
"""Steps that moe_lb sums over."""

logger = logging.getLogger("vllm.deepinfer")


class Balancer:
    """Of one rank. For the thread that runs the model; the policy it gives the state is for whichever thread asks."""

    def __init__(self, state: Any, agreement: Agreement, *, places: bool, record_to: str, max_bytes: int) -> None:
        """`state` is vLLM's EplbState. A collective, as all methods but `add_model` are.

        places: whether our policy decides. record_to: a file, or empty. max_bytes: that a rebalancing moves; 0 for any.
        """
        self._state, self._agreement = state, agreement
        self._record_to, self._max_bytes = record_to, max_bytes
        self._places, self._records = agreement.any(places), agreement.any(bool(record_to))
        self._recorder: Recorder | None = None
        self._window = int(state.parallel_config.eplb_config.window_size)
        self._counts: dict[str, StepCounts] = {}
        self._for_policy: deque[OnHost | None] = deque()
        self._loads: deque[OnHost] = deque()
        self._blocks: deque[OnHost] = deque()
        self._watchdog = Watchdog(int(state.parallel_config.eplb_config.step_interval))
        self._begun: tuple[float, dict[str, torch.Tensor]] | None = None
        self._steps = self._last_ended = 0
        self.stats = BalanceStats()

    def add_model(self) -> None:
        """The state has one model more."""
        for name, model_state in self._state.model_states.items():
            model = model_state.model
            self._counts.setdefault(
                name,
                StepCounts(max(self._window, LB_STEPS), model.num_logical_experts, model.num_local_physical_experts),
            )
        if self._places:
            self._state.policy = StepPolicy(self._next_counts, self._max_moves(), self._agreement, self.stats)

    def _max_moves(self) -> int | None:
        """How many experts may move, by the bytes of the largest."""
        if not self._max_bytes:
            return None
        largest = max(map(_expert_bytes, self._models()))
        if self._max_bytes < largest:
            logger.warning(
                "DEEPINFER_VLLM_EPLB_MAX_MIGRATION=%d is less than an expert's %d bytes: no expert will ever move. "
                "Raise it, or set it to 0 for no limit.",
                self._max_bytes,
                largest,
            )
        return self._max_bytes // largest

    def _models(self) -> list[Any]:
        return [model_state.model for model_state in self._state.model_states.values()]

    def _next_counts(self) -> Any:
        held = self._for_policy.popleft() if self._for_policy else None
        return None if held is None else held.tensor.numpy()

    def before_step(self, is_dummy: bool) -> None:
        """A step ran; vLLM is about to put its loads away. A dummy has none."""
        for name, model_state in self._state.model_states.items():
            load = model_state.expert_load_pass
            self._counts[name].add(torch.zeros_like(load) if is_dummy else load, model_state.physical_to_logical_map)

    def after_step(self) -> None:
        """vLLM has put them away, and begun or ended a rebalancing if it was time to."""
        self._steps += 1
        busy = any(model_state.rebalanced for model_state in self._state.model_states.values())
        if self._begun is not None and not busy:
            self._end_rebalancing()
        worker = self._state.async_worker
        if self._watchdog.step(busy, thread_is_dead=worker is not None and not worker.is_alive()):
            self.stats.set("stalled", float(self._watchdog.stalled))
        if self._steps % LB_STEPS == 0:
            self._end_window()
        self._take_what_arrived()

    def before_rearrange(self, *, known: bool) -> None:
        """vLLM is about to ask the policy for every model in turn. `known`: by the loads of the last steps."""
        self._for_policy.clear()
        for counts in self._counts.values():
            if known and counts.added:
                self._for_policy.append(OnHost(self._agreement.summed(counts.expert_loads(self._window))))
            else:
                self._for_policy.append(None)
        self._begun = (time.monotonic(), self._placements())

    def _placements(self) -> dict[str, torch.Tensor]:
        return {name: state.physical_to_logical_map.cpu().clone() for name, state in self._state.model_states.items()}

    def _end_rebalancing(self) -> None:
        assert self._begun is not None
        (begin, before), self._begun = self._begun, None
        for name, after in self._placements().items():
            model, old = self._state.model_states[name].model, before.get(name)
            if old is None or old.shape != after.shape:
                continue
            ranks = after.shape[1] // model.num_local_physical_experts
            moved = moved_experts(old.numpy(), after.numpy(), ranks, model.num_logical_experts)
            self.stats.count("moved_experts", moved)
            self.stats.count("moved_bytes", moved * _expert_bytes(model))
        self.stats.count("rebalances", 1)
        self.stats.count("rebalance_seconds", time.monotonic() - begin)
        self._last_ended = self._steps

    def _end_window(self) -> None:
        """Ask what all ranks' loads were. The first answer is read when it has come."""
        for counts in self._counts.values():
            loads = self._agreement.summed(counts.rank_loads(LB_STEPS)).double()
            self._loads.append(OnHost(torch.stack([loads.amax(-1).sum(), loads.mean(-1).sum()])))
        self._record()

    def _record(self) -> None:
        """The target's loads; it is the last model that vLLM adds."""
        name = next(reversed(self._counts))
        counts, model = self._counts[name], self._state.model_states[name].model
        limit = step_limit(model.num_moe_layers, model.num_logical_experts)
        if not self._records or self._steps - LB_STEPS >= limit:
            return
        block = OnHost(self._agreement.summed(counts.expert_loads(LB_STEPS)))
        if self._record_to and self._agreement.is_first:
            self._recorder = self._recorder or Recorder(Path(self._record_to), limit, self._meta(name))
            self._blocks.append(block)

    def _meta(self, name: str) -> dict[str, Any]:
        state = self._state.model_states[name]
        slots = state.physical_to_logical_map.shape[1]
        return {
            "model": state.model_name,
            "ranks": slots // state.model.num_local_physical_experts,
            "physical": slots,
            "window_size": self._window,
            "step_interval": int(self._state.parallel_config.eplb_config.step_interval),
        }

    def _take_what_arrived(self) -> None:
        models = len(self._counts)
        if len(self._loads) >= models and all(held.ready for held in list(self._loads)[:models]):
            slowest, mean = sum(self._loads.popleft().tensor for _ in range(models)).tolist()
            self.stats.count("slowest_rank_tokens", slowest)
            self.stats.count("mean_rank_tokens", mean)
            if mean:
                self.stats.set("moe_lb", slowest / mean)
            self.stats.set("steps_since_rebalance", float(self._steps - self._last_ended))
        while self._blocks and self._blocks[0].ready:
            assert self._recorder is not None
            self._recorder.add(self._blocks.popleft().tensor.numpy())


def _expert_bytes(model: Any) -> int:
    """Bytes of one expert's weights in one layer, of the layer where they are most."""
    return max(sum(int(weight[0].nbytes) for weight in layer) for layer in model.expert_weights)
