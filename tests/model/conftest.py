"""What vLLM's layers ask of a process before they can be built by themselves."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def portable_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our model, exact: every row computed, nothing rounded."""
    monkeypatch.setenv("DEEPINFER_VLLM_MODEL", "portable")
    monkeypatch.setenv("DEEPINFER_VLLM_DECODER_REPLAY", "0")
    monkeypatch.delenv("DEEPINFER_VLLM_NUMERICS", raising=False)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These tensors are tiny: a second thread only waits, and on a busy machine for long."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def vllm_layers() -> Iterator[None]:
    """A vLLM config in force and a process group of one: without them its linears and norms cannot be made."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory

    from deepinfer_vllm.checkpoint.bare import join_group_of_one

    with set_current_vllm_config(VllmConfig()):
        join_group_of_one()
        yield
    cleanup_dist_env_and_memory()
