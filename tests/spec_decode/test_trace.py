"""Texts leave a trace as they went through the engine, however they were cut; no limit and no disk breaks a step."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deepinfer_vllm.spec_decode import trace as module
from deepinfer_vllm.spec_decode import trace_files
from deepinfer_vllm.spec_decode.trace import Trace
from deepinfer_vllm.spec_decode.trace_files import TraceError, read, write_manifest

LAYERS, HIDDEN = (1, 3), 4


class Text:
    """Random states of a text, of which an engine gives a chunk at a time."""

    def __init__(self, name: str, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.name, self.length, self.done = name, length, 0
        self.ids = torch.randint(100, (length,), generator=generator, dtype=torch.int64)
        self.states = [torch.randn(length, HIDDEN, generator=generator) for _ in LAYERS]
        self.last = torch.randn(length, HIDDEN, generator=generator)

    def step(self, tokens: int) -> tuple[int, slice]:
        """Where the next chunk begins, and which it is."""
        start = self.done
        self.done = min(self.length, start + tokens)
        return start, slice(start, self.done)


def observe(trace: Trace, chunks: list[tuple[Text, int, slice]], decoding: int = 0) -> None:
    """A step of chunks, after `decoding` rows of requests that are past their prompts; padded."""
    sizes = [1] * decoding + [rows.stop - rows.start for _, _, rows in chunks]
    pad = torch.full((decoding, HIDDEN), torch.nan)
    tail = torch.full((3, HIDDEN), torch.nan)

    def whole(of: Any) -> torch.Tensor:
        return torch.cat([pad, *[of(text)[rows] for text, _, rows in chunks], tail])

    batch = SimpleNamespace(
        req_ids=["decoding"] * decoding + [text.name for text, _, _ in chunks],
        num_reqs=len(sizes),
        query_start_loc=torch.tensor([0, *sizes]).cumsum(0),
        is_prefilling_np=[False] * decoding + [True] * len(chunks),
        has_prefill=bool(chunks),
        num_computed_tokens_np=[50] * decoding + [start for _, start, _ in chunks],
        prefill_len_np=[40] * decoding + [text.length for text, _, _ in chunks],
        input_ids=torch.cat(
            [torch.zeros(decoding, dtype=torch.int64), *[t.ids[r] for t, _, r in chunks], torch.zeros(3)]
        ),
    )
    trace.observe(batch, [whole(lambda t, i=i: t.states[i]) for i in range(len(LAYERS))], whole(lambda t: t.last))


def finish(directory: Path, answer_from: int = 2) -> dict[str, trace_files.TracedText]:
    found = trace_files.requests(directory)
    texts = [{"file": file, "tokens": count, "answer_from": answer_from} for file, count in found.values()]
    write_manifest(directory, "digest", LAYERS, HIDDEN, texts)
    return dict(zip(found, read(directory), strict=True))


def same(found: trace_files.TracedText, text: Text) -> bool:
    return (
        torch.equal(found.input_ids, text.ids.int())
        and torch.equal(found.target_hidden_states, torch.cat(text.states, dim=-1))
        and torch.equal(found.target_last_hidden_states, text.last)
        and found.loss_mask.tolist() == [int(i >= 2) for i in range(text.length)]
    )


@pytest.mark.parametrize("seed", range(20))
def test_texts_in_chunks_beside_each_other_come_out_whole(seed: int, tmp_path: Path) -> None:
    """Some are preempted on the way, and computed again from their beginning."""
    rng, said = random.Random(seed), []
    texts = [Text(f"{i}-abc", rng.randint(1, 30), 100 * seed + i) for i in range(8)]
    trace = Trace(tmp_path, 1 << 30, said.append)
    running = list(texts)
    while running:
        batch = rng.sample(running, rng.randint(1, min(4, len(running))))
        for text in batch:
            if rng.random() < 0.1:
                text.done = 0
        observe(trace, [(text, *text.step(rng.randint(1, 12))) for text in batch], decoding=rng.randint(0, 3))
        running = [text for text in running if text.done < text.length]
    found = finish(tmp_path)
    assert said == [] and trace.texts == 8 and trace._held_bytes == 0
    assert {text.name: same(found[text.name], text) for text in texts} == {text.name: True for text in texts}


def test_a_prompt_that_a_cache_had_in_part_is_left_out(tmp_path: Path) -> None:
    trace, cached, whole = Trace(tmp_path, 1 << 30, print), Text("0", 20, 0), Text("1", 20, 1)
    cached.done = 8
    while whole.done < 20:
        observe(trace, [(text, *text.step(7)) for text in (cached, whole) if text.done < 20])
    assert list(finish(tmp_path)) == ["1"]


def test_prompts_that_never_end_do_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD_BYTES", 5000)
    trace = Trace(tmp_path, 1 << 30, print)
    for i in range(50):
        observe(trace, [(text := Text(str(i), 20, i), *text.step(10))])
        assert trace._held_bytes <= 5000
    observe(trace, [(text, *text.step(10))])
    assert list(finish(tmp_path)) == ["49"]


def test_it_ends_at_its_limit(tmp_path: Path) -> None:
    said: list[str] = []
    trace = Trace(tmp_path, 5000, said.append)
    for i in range(9):
        observe(trace, [(text := Text(str(i), 20, i), *text.step(20))])
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert 0 < trace.texts < 9 and size == trace.written_bytes <= 5000
    assert trace.full
    assert said == [f"The trace in {tmp_path} ends after {trace.texts} texts: the limit of 5e-06 GB is reached."]


def test_a_disk_that_fails_ends_it(tmp_path: Path) -> None:
    said: list[str] = []
    trace = Trace(tmp_path / "gone", 1 << 30, said.append)
    for i in range(3):
        observe(trace, [(text := Text(str(i), 5, i), *text.step(5))])
    assert (
        trace.full and len(said) == 1 and said[0].startswith(f"The trace in {tmp_path / 'gone'} ends after 0 texts: ")
    )


def test_size_of_a_token(tmp_path: Path) -> None:
    trace, text = Trace(tmp_path, 1 << 30, print), Text("0", 1000, 0)
    observe(trace, [(text, *text.step(1000))])
    want = 1000 * trace_files.bytes_per_token(len(LAYERS), HIDDEN, 4)
    assert want < trace.written_bytes < want + 1000


@pytest.mark.parametrize("content", ["", "[]", '{"schema": "x"}', "{}"])
def test_other_manifests_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(TraceError, match=r"manifest\.json is no trace's"):
        list(read(tmp_path))


def test_an_unfinished_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"manifest\.json: No such file.*dspark-trace` writes it last"):
        list(read(tmp_path))


@pytest.mark.parametrize("how", ["missing", "cut", "other"])
def test_a_broken_text_is_named(how: str, tmp_path: Path) -> None:
    trace, text = Trace(tmp_path, 1 << 30, print), Text("0", 9, 0)
    observe(trace, [(text, *text.step(9))])
    finish(tmp_path)
    (file,) = tmp_path.glob("text-*")
    if how == "missing":
        file.unlink()
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        save_file({"x": torch.zeros(1)}, file)
    with pytest.raises(TraceError, match="text-000000.safetensors is no text of a trace"):
        list(read(tmp_path))


def test_the_manifest_says_what_is_there(tmp_path: Path) -> None:
    trace, text = Trace(tmp_path, 1 << 30, print), Text("7-x", 9, 0)
    observe(trace, [(text, *text.step(9))])
    finish(tmp_path, answer_from=5)
    assert json.loads((tmp_path / "manifest.json").read_text()) == {
        "schema": "deepinfer.dspark-trace/1",
        "checkpoint": "digest",
        "target_layer_ids": [1, 3],
        "hidden_size": 4,
        "tokens": 9,
        "texts": [{"file": "text-000000.safetensors", "tokens": 9, "answer_from": 5}],
    }
