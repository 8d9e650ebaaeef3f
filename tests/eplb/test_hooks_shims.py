"""The places of vLLM's EPLB that are exchanged or wrapped, in the vLLM that is installed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.distributed.eplb import eplb_state, policy

from deepinfer_vllm.compat import eplb
from deepinfer_vllm.eplb.policy import place


@pytest.fixture(autouse=True)
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPINFER_VLLM_EPLB_POLICY", raising=False)
    eplb.hook_eplb()
    eplb.hook_eplb()


def test_vllm_has_what_is_wrapped() -> None:
    eplb.check_eplb()
    assert eplb_state.EplbState.deepinfer_balancer is None


def test_its_policy_is_ours() -> None:
    """Called as its state calls it, on sums and before anything was measured."""
    weight = torch.tensor([[9, 1, 1, 1], [1, 1, 1, 9]])
    old = torch.tensor([[0, 1, 2, 3, 0, 1]] * 2)
    placed = policy.EPLB_POLICIES["default"].rebalance_experts(weight, 6, 1, 1, 2, old)
    assert placed.tolist() == place(weight.unsqueeze(0).numpy(), 2, 6, current=old.numpy().astype(np.int32)).tolist()


def test_or_its_own_if_it_is_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_VLLM_EPLB_POLICY", "vllm")
    module = SimpleNamespace(EPLB_POLICIES={"default": policy.DefaultEplbPolicy}, AbstractEplbPolicy=object)
    eplb._exchange_policy(module)
    assert {"default": policy.DefaultEplbPolicy} == module.EPLB_POLICIES


@pytest.mark.parametrize("missing", ["rearrange", "EPLB_POLICIES"])
def test_a_vllm_without_them_is_refused(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Once an engine asks for EPLB; importing it changes nothing then."""
    if missing == "rearrange":
        monkeypatch.delattr(eplb_state.EplbState, "rearrange")
    else:
        monkeypatch.setattr(policy, "EPLB_POLICIES", {})
        eplb._exchange_policy(policy)
        assert policy.EPLB_POLICIES == {}
    with pytest.raises(ValueError, match=rf"^vLLM \S+ has no {missing}\S* in its EPLB") as error:
        eplb.check_eplb()
    assert "\n" not in str(error.value)


def test_a_bad_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_VLLM_EPLB_MAX_MIGRATION", "20 GB")
    with pytest.raises(ValueError, match=r"^DEEPINFER_VLLM_EPLB_MAX_MIGRATION='20 GB': the value must be a number"):
        eplb.check_eplb()


@pytest.mark.parametrize(
    ("text", "value"), [("", 0), ("0", 0), ("100K", 102_400), ("3M", 3 * 2**20), ("20G", 20 * 2**30)]
)
def test_bytes(monkeypatch: pytest.MonkeyPatch, text: str, value: int) -> None:
    from deepinfer_vllm import envs

    monkeypatch.setenv("DEEPINFER_VLLM_EPLB_MAX_MIGRATION", text)
    assert value == envs.DEEPINFER_VLLM_EPLB_MAX_MIGRATION
