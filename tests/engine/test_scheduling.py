"""However vLLM cuts, batches, caches and preempts, the answers are the golden ones (replay off)."""

import pytest
import torch

from deepinfer_vllm.checkpoint.golden import Prompt
from deepinfer_vllm.checkpoint.interface import Generation
from engine.harness import Engine, golden_prompts, preempt_all_every, preemptions, sample

MAX_ABS = 2e-4


def assert_golden(answers: list[Generation], prompts: tuple[Prompt, ...]) -> None:
    """Same greedy tokens, logits within the format's limit."""
    assert len(answers) == len(prompts)
    for answer, prompt in zip(answers, prompts, strict=True):
        assert prompt.gen_ids is not None and prompt.gen_logits is not None and answer.logits is not None
        assert answer.ids == prompt.gen_ids.tolist(), prompt.name
        assert (answer.logits - prompt.gen_logits).abs().max() <= MAX_ABS, prompt.name


@pytest.mark.parametrize("name", ["v41-tiny-a", "v41-tiny-b"])
@pytest.mark.parametrize("chunk", [2048, 64, 17])
def test_chunks_batches_and_prefix_hits(engine: Engine, name: str, chunk: int) -> None:
    prompts = golden_prompts(name)
    ids = [p.input_ids.tolist() for p in prompts]
    with engine(name, max_num_batched_tokens=chunk) as backend:
        assert_golden(backend.generate_many(ids, 24), prompts)  # all in one batch
        cached = [backend.cached_tokens(i) for i in ids]
        assert cached == [(len(i) - 1) // 32 * 32 for i in ids]  # whole blocks short of the last token
        assert_golden(backend.generate_many(ids, 24), prompts)  # from the prefix cache
        assert_golden([backend.generate(i, 24) for i in reversed(ids)], prompts[::-1])  # one by one


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_requests_resume(engine: Engine, caching: bool) -> None:
    prompts = golden_prompts("v41-tiny-a")
    ids = [p.input_ids.tolist() for p in prompts]
    with engine("v41-tiny-a", enable_prefix_caching=caching, max_num_batched_tokens=300) as backend:
        preempt_all_every(backend, 7)
        preempted = preemptions(backend)
        assert_golden(backend.generate_many(ids, 24), prompts)
        assert len(preempted) >= 12


def test_running_out_of_blocks(engine: Engine) -> None:
    text = golden_prompts("v41-tiny-a")[5].input_ids.tolist()
    prompts = [text[start : start + 8] for start in range(0, 600, 75)]
    small = {"block_size": 8, "max_num_batched_tokens": 64, "max_model_len": 768}
    with engine("v41-tiny-a", **small) as backend:
        expected = backend.generate_many(prompts, 80, logits=False)
    with engine("v41-tiny-a", num_gpu_blocks_override=172, **small) as backend:
        preempted = preemptions(backend)
        got = backend.generate_many(prompts, 80, logits=False)
        assert preempted
    assert [g.ids for g in got] == [e.ids for e in expected]


def test_prompt_logits(engine: Engine) -> None:
    prompts = golden_prompts("v41-tiny-a")
    with engine("v41-tiny-a", max_num_batched_tokens=100) as backend:
        for prompt in prompts[1:]:
            assert prompt.logits_last8 is not None and prompt.argmax is not None
            logits = backend.prefill(prompt.input_ids.tolist()).logits
            assert (logits[-8:] - prompt.logits_last8).abs().max() <= MAX_ABS
            assert torch.equal(logits.argmax(-1), prompt.argmax.long())


@pytest.mark.parametrize("block_size", [2, 16, 128])
def test_block_sizes(engine: Engine, block_size: int) -> None:
    prompts = golden_prompts("v41-tiny-a")[:5]
    ids = [p.input_ids.tolist() for p in prompts]
    with engine("v41-tiny-a", block_size=block_size, max_num_batched_tokens=50) as backend:
        assert_golden(backend.generate_many(ids, 24), prompts)
        assert_golden(backend.generate_many(ids, 24), prompts)


def test_seeded_sampling_does_not_depend_on_chunks(engine: Engine) -> None:
    prompts = [p.input_ids.tolist() for p in golden_prompts("v41-tiny-b")[3:5]]
    answers = []
    for chunk in (2048, 50):
        with engine("v41-tiny-b", max_num_batched_tokens=chunk) as backend:
            answers.append(sample(backend, prompts, 24))
    assert answers[0] == answers[1]
    assert len({tuple(ids) for ids in answers[0]}) == len(prompts)
