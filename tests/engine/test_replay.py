"""Decoder-side bounded replay: rows are skipped, and what remains is exactly the truncated computation."""

from functools import cache

import pytest
import torch

from deepinfer_vllm.checkpoint.backends import EngineBackend
from deepinfer_vllm.checkpoint.interface import Generation
from deepinfer_vllm.models.deepseek_v41.cache import PagedCache
from engine.harness import (
    GOLDEN,
    Engine,
    golden_prompts,
    model_of,
    poison,
    preempt_all_every,
    preemptions,
)
from reference import load
from reference.model import Reference

WINDOW = 16
MAX_ABS = 2e-4


@pytest.fixture(params=["V1", "V2"])
def runner(request: pytest.FixtureRequest) -> str:
    """Both of vLLM's model runners."""
    return str(request.param)


@cache
def reference() -> Reference:
    return load(GOLDEN / "v41-tiny-a")


def assert_truncated(answer: Generation, prompt: list[int], replay_from: int) -> None:
    """The answer is the reference's when window rows before `replay_from` are missing above the last KV source."""
    want = reference().forward(prompt + answer.ids[:-1], replay_from=replay_from).logits[len(prompt) - 1 :]
    assert answer.logits is not None
    assert (answer.logits - want).abs().max() <= MAX_ABS
    assert answer.ids == want.argmax(-1).tolist()


def tokens_through_last_layer(backend: EngineBackend) -> list[int]:
    """A list that will hold how many tokens each step runs through the last layer's experts."""
    counts: list[int] = []
    experts = model_of(backend).layers[-1].ffn.experts
    experts.register_forward_hook(lambda _, inputs, __: counts.append(len(inputs[0])))
    return counts


def test_a_prompt_in_one_chunk(engine: Engine, runner: str) -> None:
    prompts = [p.input_ids.tolist() for p in golden_prompts("v41-tiny-a")]
    with engine("v41-tiny-a", replay=True, runner=runner) as backend:
        poison(backend)
        counts = tokens_through_last_layer(backend)
        first = backend.generate_many(prompts, 24)
        assert counts[0] == sum(min(len(p), WINDOW) for p in prompts)
        for answer, prompt in zip(first, prompts, strict=True):
            assert_truncated(answer, prompt, max(0, len(prompt) - WINDOW))
        again = backend.generate_many(prompts, 24)  # prefix hits, their last window recomputed
        assert [a.ids for a in again] == [f.ids for f in first]
        for a, f in zip(again, first, strict=True):
            assert a.logits is not None and f.logits is not None
            assert (a.logits - f.logits).abs().max() <= MAX_ABS
        assert backend.cached_tokens(prompts[5]) == 672


@pytest.mark.parametrize("chunk", [64, 17])
def test_a_prompt_in_chunks(engine: Engine, runner: str, chunk: int) -> None:
    prompt = golden_prompts("v41-tiny-a")[4].input_ids.tolist()
    last = (len(prompt) - 1) // chunk * chunk  # where the last chunk starts
    kept_before = last - WINDOW if len(prompt) - last <= WINDOW else len(prompt) - WINDOW
    with engine("v41-tiny-a", replay=True, runner=runner, max_num_batched_tokens=chunk) as backend:
        poison(backend)
        assert_truncated(backend.generate(prompt, 24), prompt, kept_before)


def test_a_hit_followed_by_chunks_within_the_window(engine: Engine, runner: str) -> None:
    prompt = golden_prompts("v41-tiny-a")[4]
    ids = prompt.input_ids.tolist()
    with engine("v41-tiny-a", replay=True, runner=runner, max_num_batched_tokens=8, max_num_seqs=4) as backend:
        poison(backend)
        whole = backend.generate(ids, 24)  # no chunk exceeds the window, so nothing is skipped
        assert prompt.gen_logits is not None and whole.logits is not None
        assert (whole.logits - prompt.gen_logits).abs().max() <= MAX_ABS
        assert backend.cached_tokens(ids) == 256
        assert_truncated(backend.generate(ids, 24), ids, 256 - WINDOW)


def test_prompt_logprobs_keep_every_row(engine: Engine, runner: str) -> None:
    prompts = golden_prompts("v41-tiny-a")
    with engine("v41-tiny-a", replay=True, runner=runner) as backend:
        poison(backend)
        for prompt in prompts[3:]:
            assert prompt.logits_last8 is not None and prompt.argmax is not None
            logits = backend.prefill(prompt.input_ids.tolist()).logits
            assert (logits[-8:] - prompt.logits_last8).abs().max() <= MAX_ABS
            assert torch.equal(logits.argmax(-1), prompt.argmax.long())


def test_prompt_logprobs_keep_every_row_after_preemption(engine: Engine, runner: str) -> None:
    prompt = golden_prompts("v41-tiny-a")[4]
    with engine("v41-tiny-a", replay=True, runner=runner) as backend:
        preempt_all_every(backend, 6)
        answer = backend.generate_many([prompt.input_ids.tolist()], 24, prompt_logprobs=0)[0]
        assert prompt.gen_logits is not None and answer.logits is not None
        assert (answer.logits - prompt.gen_logits).abs().max() <= MAX_ABS


def test_preemption_and_mixed_batches(engine: Engine, runner: str) -> None:
    prompts = [p.input_ids.tolist() for p in golden_prompts("v41-tiny-a")]
    with engine("v41-tiny-a", replay=True, runner=runner, max_num_batched_tokens=200) as backend:
        poison(backend)
        preempt_all_every(backend, 5)
        preempted = preemptions(backend)
        answers = backend.generate_many(prompts, 24)
        assert len(preempted) >= 12
    for answer in answers:
        assert answer.logits is not None and answer.logits.isfinite().all()


def test_vllm_switch_turns_it_off(engine: Engine, runner: str) -> None:
    prompt = golden_prompts("v41-tiny-a")[4]
    with engine("v41-tiny-a", replay=True, runner=runner, swa_bounded_replay=False) as backend:
        assert not model_of(backend).replay
        answer = backend.generate(prompt.input_ids.tolist(), 24)
        assert prompt.gen_logits is not None and answer.logits is not None
        assert (answer.logits - prompt.gen_logits).abs().max() <= MAX_ABS


def test_a_hit_leaves_shared_rows_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runner V2 tells what is computed again, so that only the rows no one else reads are written again."""
    prompt, hit = golden_prompts("v41-tiny-a")[4].input_ids.tolist()[:247], 224
    rows: dict[str, int] = {}
    write = PagedCache.write

    def counted(cache: PagedCache, table: torch.Tensor, request: torch.Tensor, *rest: torch.Tensor) -> None:
        rows.setdefault(cache.name, len(request))
        write(cache, table, request, *rest)

    with engine("v41-tiny-a", replay=True, runner="V2") as backend:
        backend.generate(prompt, 1)
        monkeypatch.setattr(PagedCache, "write", counted)
        assert backend.cached_tokens(prompt) == hit
        windows = {layer.attn.window_rows.name: layer.attn.skips_rows for layer in model_of(backend).layers}
    assert {rows[name] for name, rebuilt in windows.items() if rebuilt} == {WINDOW}
    assert {rows[name] for name, rebuilt in windows.items() if not rebuilt} == {len(prompt) - hit}
    assert rows["layers.2.attn.compressor.rows"] == len(prompt) // 2 - hit // 2


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_rows_that_a_connector_loads_serve_as_a_hit(engine: Engine, runner: str) -> None:
    from engine import memory_connector

    prompt = golden_prompts("v41-tiny-a")[4].input_ids.tolist()
    transfer = {"kv_connector": "MemoryConnector", "kv_role": "kv_both"}
    transfer["kv_connector_module_path"] = memory_connector.__name__
    memory_connector.STORE.clear()
    with engine("v41-tiny-a", replay=True, runner=runner, kv_transfer_config=transfer) as backend:
        first = backend.generate(prompt, 24)
        hit = backend.generate(prompt, 24)
    with engine("v41-tiny-a", replay=True, runner=runner, kv_transfer_config=transfer) as backend:
        poison(backend)
        loaded = backend.generate(prompt, 24)
        assert backend.scheduler.connector is not None
    assert loaded.ids == hit.ids == first.ids
    assert loaded.logits is not None and hit.logits is not None
    assert torch.equal(loaded.logits, hit.logits)


def test_windows_that_a_connector_loads_are_seen(engine: Engine, runner: str) -> None:
    """Nothing is computed again, so the prompt's last token sees its whole window, as it did where it was computed."""
    from engine import memory_connector

    prompt = golden_prompts("v41-tiny-a")[4].input_ids.tolist()[:257]  # blocks hold all but the last token
    transfer = {"kv_connector": "WholeConnector", "kv_role": "kv_both"}
    transfer["kv_connector_module_path"] = memory_connector.__name__
    memory_connector.STORE.clear()
    for computed in (prompt, prompt[-1:]):
        with engine("v41-tiny-a", replay=True, runner=runner, kv_transfer_config=transfer) as backend:
            poison(backend)
            counts = tokens_through_last_layer(backend)
            assert_truncated(backend.generate(prompt, 24), prompt, len(prompt) - WINDOW)
            assert counts[0] == min(len(computed), WINDOW)
