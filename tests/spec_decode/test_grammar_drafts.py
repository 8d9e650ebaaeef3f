"""Masks on drafts, against a plain reading of regular expressions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import regex
import torch

from deepinfer_vllm.spec_decode import grammar_compiler
from deepinfer_vllm.spec_decode.grammar_compiler import FAILED, PENDING, READY
from deepinfer_vllm.spec_decode.grammar_drafts import GrammarDrafts, several
from deepinfer_vllm.spec_decode.stats import DraftStats
from deepinfer_vllm.torch_kernels.bits import pack_bits
from grammar_case import STEPS, Worker, engine_config, structured

PATTERN = "(yes|no){2} [0-9]{3}-[a-f]{2}"
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        return engine_config(tmp_path_factory.mktemp("grammar") / "checkpoint")


@pytest.fixture(scope="module")
def tokenizer(config: Any) -> Any:
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(config.model_config)


@pytest.fixture
def worker(config: Any) -> Worker:
    return Worker(GrammarDrafts(config))


def noise(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, STEPS, vocabulary, generator=torch.Generator().manual_seed(seed))


def allowed(tokenizer: Any, pattern: str, output: Sequence[int]) -> set[int]:
    """Tokens after which the text can still become a match; the end where it is one."""
    text = tokenizer.decode(output)
    special = {*tokenizer.all_special_ids}
    texts = {token: tokenizer.decode([token]) for token in range(len(tokenizer)) if token not in special}
    found = {t for t, more in texts.items() if more and regex.fullmatch(pattern, text + more, partial=True)}
    return found | ({tokenizer.eos_token_id} if regex.fullmatch(pattern, text) else set())


def kept(logits: torch.Tensor) -> set[int]:
    return set((logits > -torch.inf).nonzero().flatten().tolist())


def test_masks_are_the_tokens_that_lead_to_a_match(worker: Worker, tokenizer: Any) -> None:
    """Drafted to its end and past it, by blocks of which the target takes a part, and one token of its own."""
    worker.add("a", 2, structured(tokenizer, regex=PATTERN), PROMPT)
    worker.compiled("a")
    output: list[int] = []
    for block in range(20):
        logits = noise(1, len(tokenizer), block)
        drafts, masked = worker.draft(["a"], logits)
        seen = list(output)
        for step, token in enumerate(drafts[0]):
            if tokenizer.eos_token_id in seen:
                assert (masked[step][0] == logits[0, step]).all()
            else:
                assert kept(masked[step][0]) == allowed(tokenizer, PATTERN, seen)
            seen.append(token)
        output += drafts[0][: block % STEPS]
        if tokenizer.eos_token_id in output:
            break
        output.append(min(allowed(tokenizer, PATTERN, output)))
        worker.emit("a", output[int(worker.total_len.gpu[2]) - len(PROMPT) :])
    assert regex.fullmatch(PATTERN, tokenizer.decode(output[: output.index(tokenizer.eos_token_id)]))
    assert worker.drafts.requests.unmasked == worker.drafts.requests.unready_blocks == 0


def test_rows_without_a_grammar_stay_as_they_are(worker: Worker, tokenizer: Any) -> None:
    from vllm import SamplingParams

    logits = noise(3, len(tokenizer))
    worker.add("plain", 0, SamplingParams(), PROMPT)
    assert worker.draft([None, "plain", None], logits)[1][0].equal(logits[:, 0])
    worker.add("a", 1, structured(tokenizer, choice=["perhaps so"]), PROMPT)
    worker.compiled("a")
    _, masked = worker.draft(["plain", None, "a"], logits)
    for step in range(STEPS):
        assert masked[step][:2].equal(logits[:2, step])
    assert kept(masked[0][2]) < set(range(len(tokenizer)))


def test_two_requests_share_a_grammar_at_different_states(worker: Worker, tokenizer: Any) -> None:
    for slot, name in enumerate("ab"):
        worker.add(name, slot, structured(tokenizer, regex=PATTERN), PROMPT)
        worker.compiled(name)
    ahead = [tokenizer.encode("yes", add_special_tokens=False), tokenizer.encode("nono 12", add_special_tokens=False)]
    for name, output in zip("ab", ahead, strict=True):
        worker.emit(name, output)
    for order in (["a", "b"], ["b", "a"]):
        drafts, masked = worker.draft(order, noise(2, len(tokenizer)))
        for row, name in enumerate(order):
            for step in range(STEPS):
                output = ahead["ab".index(name)] + drafts[row][:step]
                assert kept(masked[step][row]) == allowed(tokenizer, PATTERN, output)
    compiler = worker.drafts.requests._compiler._backend.compiler  # type: ignore[union-attr]
    held = compiler.get_cache_size_bytes()
    worker.add("c", 2, structured(tokenizer, regex=PATTERN), PROMPT)
    worker.compiled("c")
    assert compiler.get_cache_size_bytes() == held > 0


def test_drafts_without_an_alternative_are_sure(worker: Worker, tokenizer: Any) -> None:
    """After Q comes Z, after that one of two letters, and then the end."""
    worker.add("a", 0, structured(tokenizer, regex="QZ[jx]"), PROMPT)
    worker.compiled("a")
    confidences = torch.full((4, STEPS), 0.5)
    stats = DraftStats(STEPS)
    worker.draft([None, "a"], noise(2, len(tokenizer)))
    worker.drafts.ended(confidences, stats)
    assert confidences.tolist() == [[0.5] * 4, [1, 1, 0.5, 1], [0.5] * 4, [0.5] * 4]
    worker.add("b", 3, structured(tokenizer, "guidance", regex="QZ[jx]"), PROMPT)
    worker.drafts.ended(confidences, stats)
    assert stats.take()["counters"] == {"masked_tokens": 4, "unmasked_requests": 1}
    worker.drafts.requests.finish(["a"])
    worker.drafts.ended(confidences.fill_(0.5), None)
    assert (confidences == 0.5).all()


@pytest.mark.parametrize("bit", [0, 5, 31, 32, 63])
def test_bits_are_counted_up_to_two(bit: int) -> None:
    bits = torch.zeros(4, 64, dtype=torch.bool)
    bits[0, bit] = True
    bits[1, [bit, (bit + 9) % 64]] = True
    bits[3] = True
    assert several(torch.from_numpy(pack_bits(bits.flatten().numpy()).reshape(4, 2))) == [1, 2, 0, 2]


def test_a_request_goes_on_after_preemption(worker: Worker, tokenizer: Any) -> None:
    """In another slot, with the output it had, or with the last of it drawn anew."""
    params = structured(tokenizer, regex=PATTERN)
    worker.add("a", 0, params, PROMPT)
    worker.compiled("a")
    output = tokenizer.encode("yesno 1", add_special_tokens=False)
    worker.emit("a", output)
    worker.draft(["a"], noise(1, len(tokenizer)))
    for again in (output, [*tokenizer.encode("no", add_special_tokens=False)], []):
        worker.add("a", 3, params, PROMPT, again)
        _, masked = worker.draft(["a"], noise(1, len(tokenizer)))
        assert kept(masked[0][0]) == allowed(tokenizer, PATTERN, again)
    assert worker.drafts.requests.unready_blocks == 0


def test_a_long_output_that_comes_at_once(worker: Worker, tokenizer: Any) -> None:
    """As after a compilation that took many steps, or drafts that were not wanted for a while."""
    pattern = "[a-z]{200,}!"
    worker.add("a", 0, structured(tokenizer, regex=pattern), PROMPT)
    worker.compiled("a")
    output = tokenizer.encode("abcdefgh" * 20, add_special_tokens=False)
    worker.emit("a", output)
    for _ in range(50):  # 200 drafts taken back
        drafts, masked = worker.draft(["a"], noise(1, len(tokenizer)))
    assert kept(masked[-1][0]) == allowed(tokenizer, pattern, output + drafts[0][:-1])


def test_other_backends_are_left_alone_and_counted(worker: Worker, tokenizer: Any) -> None:
    worker.add("a", 0, structured(tokenizer, "guidance", regex=PATTERN), PROMPT)
    logits = noise(1, len(tokenizer))
    assert worker.draft(["a"], logits)[1][0].equal(logits[:, 0])
    worker.add("a", 1, structured(tokenizer, "guidance", regex=PATTERN), PROMPT, [8])
    assert worker.drafts.requests.unmasked == 1
    worker.drafts.requests.finish(["a"])
    assert not worker.drafts.requests._left


def test_a_grammar_that_does_not_compile(worker: Worker, tokenizer: Any) -> None:
    params = structured(tokenizer, grammar='root ::= "a"')
    params.structured_outputs.grammar = "root ::= nothing"  # past validation, which would refuse the request
    worker.add("a", 0, params, PROMPT)
    worker.compiled("a")
    logits = noise(1, len(tokenizer))
    assert worker.draft(["a"], logits)[1][0].equal(logits[:, 0])
    assert worker.drafts.requests.unmasked == 1


def test_output_that_is_not_the_grammars(worker: Worker, tokenizer: Any) -> None:
    worker.add("a", 0, structured(tokenizer, regex=PATTERN), PROMPT)
    worker.compiled("a")
    worker.emit("a", tokenizer.encode("maybe", add_special_tokens=False))
    logits = noise(1, len(tokenizer))
    assert worker.draft(["a"], logits)[1][0].equal(logits[:, 0])
    assert worker.drafts.requests.unmasked == 1


def test_until_every_rank_has_compiled_none_masks(
    worker: Worker, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [PENDING]
    worker.drafts.requests._ranks = 2
    monkeypatch.setattr(
        "deepinfer_vllm.spec_decode.grammar_requests.agreed",
        lambda stands: [min(pair) for pair in zip(stands, others, strict=True)],
    )
    worker.add("a", 0, structured(tokenizer, regex=PATTERN), PROMPT)
    worker.compiled("a")
    logits = noise(1, len(tokenizer))
    assert worker.draft(["a"], logits)[1][0].equal(logits[:, 0])
    assert worker.drafts.requests.unready_blocks == 1
    others[0] = READY
    assert kept(worker.draft(["a"], logits)[1][0][0]) == allowed(tokenizer, PATTERN, [])
    worker.add("b", 1, structured(tokenizer, regex=PATTERN), PROMPT)
    others[0] = FAILED
    worker.draft(["b"], logits)
    assert worker.drafts.requests.unmasked == 1


def test_an_aborted_request_leaves_nothing(worker: Worker, tokenizer: Any) -> None:
    for name in "abc":
        worker.add(name, 0, structured(tokenizer, json='{"type": "object"}'), PROMPT)
    worker.drafts.requests.finish(["a", "b", "c", "unknown"])
    assert not worker.drafts.requests._requests
    logits = noise(1, len(tokenizer))
    assert worker.draft(["a"], logits)[1][0].equal(logits[:, 0])


def test_tokens_beyond_the_tokenizer_are_never_drafted(tmp_path: Path, config: Any, tokenizer: Any) -> None:
    """A vocabulary padded in the checkpoint."""
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        padded = len(tokenizer) + 40
        patch.setattr(type(config.model_config), "get_vocab_size", lambda _: padded)
        worker = Worker(GrammarDrafts(config))
        worker.add("a", 0, structured(tokenizer, regex=".*"), PROMPT)
        worker.compiled("a")
        _, masked = worker.draft(["a"], noise(1, padded))
        assert max(kept(masked[0][0])) < len(tokenizer)


def test_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import Future

    pending, ready, failed = Future[Any](), Future[Any](), Future[Any]()
    ready.set_result(None)
    failed.set_exception(ValueError())
    assert [grammar_compiler.stand(f) for f in (pending, ready, failed)] == [PENDING, READY, FAILED]
    assert FAILED < PENDING < READY
