"""Our policy and our measurements in vLLM's EPLB, which takes neither from outside.

Its table of policies is a dict of one entry; a policy sees one sum over the window, in which steps of different ranks
do not stand beside each other; and its state tells nobody what it does. The entry is exchanged, and the state's three
methods are wrapped, so that a `Balancer` beside it sees every step.
"""

import functools
import logging
from typing import Any

from deepinfer_vllm.compat.late import after_import

BALANCER = "deepinfer_balancer"
"""Attribute of an EplbState: what is wrapped around it, if anything is."""

_STATE_METHODS = ("add_model", "step", "rearrange", "_should_record_current_step")

logger = logging.getLogger("vllm.deepinfer")


def hook_eplb() -> None:
    """Balance by our policy and measure, wherever an engine enables EPLB."""
    after_import("vllm.distributed.eplb.policy", _exchange_policy)
    after_import("vllm.distributed.eplb.eplb_state", _wrap_state)


def check_eplb() -> None:
    """Raises ValueError where an engine with EPLB would run without what this plugin adds, or with a bad variable."""
    from vllm.distributed.eplb import eplb_state, policy

    from deepinfer_vllm import envs

    envs.check()
    state = getattr(eplb_state, "EplbState", None)
    missing = [name for name in _STATE_METHODS if not hasattr(state, name)]
    if "default" not in getattr(policy, "EPLB_POLICIES", {}):
        missing.append("EPLB_POLICIES['default']")
    if missing:
        from vllm import __version__

        raise ValueError(
            f"vLLM {__version__} has no {missing[0]} in its EPLB, where this plugin measures and places (0.32 and 0.33 "
            "do). Use one of these, leave --enable-eplb away, or leave this plugin out of VLLM_PLUGINS"
        )


def _exchange_policy(module: Any) -> None:
    from deepinfer_vllm import envs

    if "default" not in getattr(module, "EPLB_POLICIES", {}) or envs.DEEPINFER_VLLM_EPLB_POLICY == "vllm":
        return

    class PlacePolicy(module.AbstractEplbPolicy):
        """On sums; every rank decides for itself, alike. A state with a balancer has a `StepPolicy` in its place."""

        deepinfer_places = True

        @classmethod
        def rebalance_experts(
            cls, weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_ranks: int, old: Any = None
        ) -> Any:
            from deepinfer_vllm.eplb.vllm_policy import decide

            return decide(None, weight, num_replicas, num_nodes, num_ranks, old, None)

    module.EPLB_POLICIES["default"] = PlacePolicy


def _wrap_state(module: Any) -> None:
    state: Any = getattr(module, "EplbState", None)
    if hasattr(state, BALANCER) or not all(hasattr(state, name) for name in _STATE_METHODS):
        return
    add_model, step, rearrange, should_record = (getattr(state, name) for name in _STATE_METHODS)

    @functools.wraps(add_model)
    def add_and_accompany(self: Any, *args: Any, **kwargs: Any) -> None:
        add_model(self, *args, **kwargs)
        if self.parallel_config.enable_elastic_ep:
            logger.warning("EPLB of an elastic engine is not measured, and experts are placed by sums over its window.")
            return
        if self.deepinfer_balancer is None:
            self.deepinfer_balancer = _balancer(self)
        self.deepinfer_balancer.add_model()

    @functools.wraps(step)
    def step_and_measure(self: Any, is_dummy: bool = False, is_profile: bool = False, log_stats: bool = False) -> None:
        balancer = self.deepinfer_balancer
        if balancer is None or is_profile:
            step(self, is_dummy, is_profile, log_stats)
            return
        balancer.before_step(is_dummy)
        step(self, is_dummy, is_profile, log_stats)
        balancer.after_step()

    @functools.wraps(rearrange)
    def rearrange_and_measure(self: Any, is_profile: bool = False, *args: Any, **kwargs: Any) -> Any:
        if self.deepinfer_balancer is not None and not is_profile:
            self.deepinfer_balancer.before_rearrange(known=not args and not any(kwargs.values()))
        return rearrange(self, is_profile, *args, **kwargs)

    @functools.wraps(should_record)
    def record_every_step(self: Any, *args: Any, **kwargs: Any) -> bool:
        """vLLM skips the steps whose loads would have left its window; ours are measured in every step."""
        return self.deepinfer_balancer is not None or bool(should_record(self, *args, **kwargs))

    setattr(state, BALANCER, None)
    state.add_model, state.step, state.rearrange = add_and_accompany, step_and_measure, rearrange_and_measure
    state._should_record_current_step = record_every_step


def _balancer(state: Any) -> Any:
    from vllm.distributed.parallel_state import get_ep_group, get_eplb_group

    from deepinfer_vllm import envs
    from deepinfer_vllm.eplb.agreement import Agreement
    from deepinfer_vllm.eplb.balancer import Balancer

    return Balancer(
        state,
        Agreement(get_ep_group().device_group, get_eplb_group().cpu_group),
        places=hasattr(state.policy, "deepinfer_places"),
        record_to=envs.DEEPINFER_VLLM_EPLB_RECORD,
        max_bytes=envs.DEEPINFER_VLLM_EPLB_MAX_MIGRATION,
    )
