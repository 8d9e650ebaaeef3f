"""The reference against the golden vectors: two implementations that share no code."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from deepinfer_vllm.checkpoint import checks, compare, golden
from deepinfer_vllm.checkpoint.interface import Generation, Prefill
from reference import Output, Reference, load

GOLDEN = Path(__file__).parent / "golden"
SETS = ["v41-tiny-a", "v41-tiny-b", "v41-tiny-a-fp8"]


@functools.cache
def read(name: str) -> tuple[golden.Golden, Reference]:
    return golden.read(GOLDEN / name), load(GOLDEN / name)


@functools.cache
def compute(name: str, kind: str, number: int) -> tuple[golden.Prompt, golden.Values, Output]:
    """The golden values of a prompt, and the reference's pass over prompt and continuation together."""
    vectors, reference = read(name)
    values = vectors.values[kind]
    prompt = values.prompts[number]
    assert prompt.gen_ids is not None
    ids = torch.cat([prompt.input_ids, prompt.gen_ids[:-1]])
    return prompt, values, reference.forward(ids, qat=kind == "qat")


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("kind", ["plain", "qat"])
@pytest.mark.parametrize("name", SETS)
def test_everything_stored_for_a_prompt(name: str, kind: str, number: int) -> None:
    prompt, values, out = compute(name, kind, number)
    tokens = len(prompt.input_ids)
    steps = out.logits[tokens - 1 :]
    prefill = Prefill(
        logits=out.logits[:tokens],
        hidden_states=out.hidden_states[:, :tokens],
        router_ids=out.router_ids[:, :tokens],
        engram_hash_ids=None if out.engram_hash_ids is None else out.engram_hash_ids[:, :tokens],
        candidate_blocks=None if out.candidate_blocks is None else out.candidate_blocks[:tokens],
        index_topk={layer: chosen[:tokens] for layer, chosen in out.index_topk.items()},
    )
    generation = Generation(steps.argmax(-1).tolist(), steps)
    rows = checks.prompt_rows(prefill, generation, prompt, values.limits)
    assert rows and all(row.ok for row in rows), [row for row in rows if not row.ok]


@pytest.mark.parametrize("name", SETS)
def test_plain_logits_are_far_inside_the_limit(name: str) -> None:
    for number in range(6):
        prompt, _, out = compute(name, "plain", number)
        assert prompt.gen_logits is not None
        row = compare.max_abs(prompt.name, "logits", out.logits[len(prompt.input_ids) - 1 :], prompt.gen_logits, 3e-5)
        assert row.ok, row


@pytest.mark.parametrize("kind", ["plain", "qat"])
@pytest.mark.parametrize("name", SETS)
def test_mixes_streams_and_router_weights(name: str, kind: str) -> None:
    vectors, reference = read(name)
    for prompt in vectors.values[kind].prompts:
        if prompt.pre_mix is None:
            continue
        assert prompt.streams_last is not None and prompt.router_weights is not None
        out = reference.forward(prompt.input_ids, qat=kind == "qat")
        torch.testing.assert_close(out.pre_mix.float(), prompt.pre_mix, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(out.streams_last.float(), prompt.streams_last, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(out.router_weights.float(), prompt.router_weights, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["v41-tiny-a", "v41-tiny-a-fp8"])
def test_engram_constants(name: str) -> None:
    from reference import engram_hash

    vectors, reference = read(name)
    constants, config = vectors.values["qat"].constants, reference.config
    assert reference.token_map == constants["engram.token_map"].tolist()
    assert max(reference.token_map) + 1 == config.engram_compressed_vocab_size
    drawn = [engram_hash.multipliers(config, layer) for layer in config.engram_layer_ids]
    assert drawn == constants["engram.multipliers"].tolist()
    assert list(engram_hash.primes(config).values()) == constants["engram.primes"].tolist()


def test_dequantised_weights() -> None:
    vectors, reference = read("v41-tiny-a-fp8")
    stored = {k.removeprefix("deq."): v for k, v in vectors.values["qat"].constants.items() if k.startswith("deq.")}
    assert stored
    for name, want in stored.items():
        base, _, rows = name.partition(".rows0_")
        got = reference.weights[base][: int(rows) if rows else None]
        assert torch.equal(got.float(), want.float()), name


@pytest.mark.parametrize("kind", ["plain", "qat"])
def test_float32_stays_within_the_limits(kind: str) -> None:
    vectors, reference = read("v41-tiny-a")
    values = vectors.values[kind]
    prompt = values.prompts[3]
    out = reference.forward(prompt.input_ids, qat=kind == "qat", dtype=torch.float32)
    rows = checks.prompt_rows(Prefill(out.logits, out.hidden_states), None, prompt, values.limits)
    assert rows and all(row.ok for row in rows), [row for row in rows if not row.ok]
