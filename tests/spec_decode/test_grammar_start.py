"""Grammars that begin after reasoning, beside vLLM's own manager, which knows when that ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_vllm.spec_decode.grammar_drafts import GrammarDrafts
from deepinfer_vllm.spec_decode.grammar_start import GrammarStart, first_masks
from deepinfer_vllm.spec_decode.grammar_state import GrammarState
from grammar_case import STEPS, WAIT_SECONDS, Worker, engine_config, structured

PATTERN = "(yes|no){2} [0-9]{3}-[a-f]{2}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grammar") / "checkpoint"


class Engine:
    """The engine core's half: vLLM's manager and one request; `worker` is told what a worker is."""

    def __init__(self, directory: Path, parser: str, *, prompt: list[int], **constraint: Any) -> None:
        from vllm.v1.request import Request
        from vllm.v1.structured_output import StructuredOutputManager

        config = engine_config(directory, structured_outputs_config={"reasoning_parser": parser})
        self.manager = StructuredOutputManager(config)
        self.tokenizer = self.manager.tokenizer
        params = structured(self.tokenizer, **constraint)
        self.request = Request("a", prompt, params, None)
        self.manager.grammar_init(self.request)
        self.worker = Worker(GrammarDrafts(config))
        self.worker.add("a", 0, params, prompt)
        self.worker.compiled("a")
        self.request.structured_output_request._grammar.result(WAIT_SECONDS)

    def step(self, drafts: list[int], tokens: list[int]) -> None:
        """Verify drafts, of which and of the bonus token come `tokens`."""
        from vllm.v1.core.sched.output import GrammarOutput

        masks = self.manager.grammar_bitmask({"a": self.request}, ["a"], {"a": drafts})
        assert masks is not None
        self.worker.drafts.requests.see_masks(GrammarOutput(["a"], masks), {"a": drafts})
        self.request.append_output_token_ids(tokens)
        assert self.manager.accept_tokens(self.request, tokens)
        self.worker.emit("a", tokens)

    def next_mask(self) -> torch.Tensor:
        """The bits of the next token's mask, [vocabulary]."""
        masks = self.manager.grammar_bitmask({"a": self.request}, ["a"], {})
        assert masks is not None
        return torch.from_numpy(np.unpackbits(masks[0].view(np.uint8), bitorder="little").view(np.bool_))


def masked(engine: Engine) -> torch.Tensor:
    """Which tokens the first draft may be, [vocabulary]."""
    logits = torch.zeros(1, STEPS, len(engine.tokenizer))
    return engine.worker.draft(["a"], logits)[1][0][0] == 0


@pytest.mark.parametrize("parser", ["deepseek_r1", "deepseek_v41"])
@pytest.mark.parametrize("bonus", [0, 1, 3])
def test_drafts_are_masked_from_the_end_of_reasoning_on(
    directory: Path, parser: str, bonus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`bonus` tokens of the answer come in the step that ends the reasoning."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    engine = Engine(directory, parser, prompt=[5, 1009, 7], regex=PATTERN)
    think = [engine.tokenizer.encode(text, add_special_tokens=False)[0] for text in ("a", "b", "c")]
    answer = engine.tokenizer.encode("yesno 123-ab", add_special_tokens=False)
    end = engine.tokenizer.get_vocab()["</think>"]
    engine.step([], think[:1])
    engine.step(think, think)
    assert masked(engine).all()
    engine.step([end, *answer[:bonus]], [end, *answer[:bonus]])
    assert masked(engine).all()  # not known yet
    for token in answer[bonus:-1]:
        engine.step([], [token])
        assert masked(engine).equal(engine.next_mask())
    assert engine.worker.drafts.requests.unmasked == 0


def test_masked_from_the_start_where_there_is_no_reasoning(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    engine = Engine(directory, "deepseek_r1", prompt=[5, 1009, 1010], regex=PATTERN)
    for token in engine.tokenizer.encode("yesno 1", add_special_tokens=False):
        engine.step([], [token])
        assert masked(engine).equal(engine.next_mask())
    assert engine.worker.drafts.requests.unready_blocks == 0


@pytest.mark.parametrize("implicit", [False, True])
def test_the_start_is_found_among_masks_with_a_few_holes(
    directory: Path, implicit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the model reasons, as vLLM 0.33 gives them. `implicit`: the token that ends it belongs to the answer."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    engine = Engine(directory, "deepseek_r1", prompt=[5], regex=PATTERN)
    state, search = GrammarState(engine.worker.drafts.requests._requests["a"].compiling.result()), GrammarStart()
    reasoning = np.full(32, -1, np.int32)
    reasoning[7] = -2
    first, *rest = engine.tokenizer.encode("yesno 1", add_special_tokens=False)
    output = [50, 51, 1010, first, *rest] if not implicit else [50, 51, first, *rest]
    begin = output.index(first)
    for outputs in range(begin + (not implicit)):
        search.observe(outputs, reasoning)
        assert search.locate(state, output[: outputs + 1]) is None
    follower = GrammarState(engine.worker.drafts.requests._requests["a"].compiling.result())
    follower.follow(output[begin : begin + 1])
    bitmask = torch.empty(1, 32, dtype=torch.int32)
    assert follower.fill(bitmask, 0)
    follower.resume([])
    search.observe(begin + 1, bitmask[0].numpy())
    assert search.locate(state, output) == begin


def test_first_masks_of_both_layouts() -> None:
    from vllm.v1.core.sched.output import GrammarOutput

    names, drafts = ["a", "b", "c"], {"a": [1, 2], "c": [3, 4]}
    packed = np.arange(7, dtype=np.int32)[:, None]
    assert {n: m[0] for n, m in first_masks(GrammarOutput(names, packed), drafts, 3).items()} == {
        "a": 0,
        "b": 3,
        "c": 4,
    }
    assert first_masks(GrammarOutput(names, packed), {"a": [1, 2]}, 3) == {}
    padded = np.arange(9, dtype=np.int32)[:, None]
    assert {n: m[0] for n, m in first_masks(GrammarOutput(names, padded), drafts, 3).items()} == {
        "a": 0,
        "b": 3,
        "c": 6,
    }
