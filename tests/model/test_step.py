"""A step: built from what vLLM tells each cache, and narrowed to some of its tokens."""

from typing import Any

import torch

from deepinfer_vllm.models.deepseek_v41.backend import PagedRowsMetadata
from deepinfer_vllm.models.deepseek_v41.config import ModelConfig
from deepinfer_vllm.models.deepseek_v41.step import Step
from small_model import hf_config


def metadata(table: torch.Tensor, starts: list[int], lengths: list[int]) -> PagedRowsMetadata:
    return PagedRowsMetadata(table, torch.tensor(starts, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32))


def test_tokens_that_pad_the_batch_are_left_out() -> None:
    one, other = torch.arange(6).view(3, 2), torch.arange(9).view(3, 3)
    starts, lengths = [0, 4, 5, 8], [4, 20, 9]
    positions = torch.tensor([0, 1, 2, 3, 19, 6, 7, 8, 0, 0, 0, 0], dtype=torch.int32)
    step = Step.from_metadata(
        {"one": metadata(one, starts, lengths), "other": metadata(other, starts, lengths)}, positions
    )
    assert step.num_tokens == 8
    assert step.positions.tolist() == [0, 1, 2, 3, 19, 6, 7, 8] and step.positions.dtype == torch.int64
    assert step.request.tolist() == [0, 0, 0, 0, 1, 2, 2, 2] and step.request.dtype == torch.int64
    assert step.spans == [(0, 4), (4, 5), (5, 8)] and step.seq_lens == lengths
    assert step.tables["one"] is one and step.tables["other"] is other
    assert step.selected is step.candidates is step.window_floor is None and step.engram_rows == {}


def test_a_request_without_tokens_keeps_its_place() -> None:
    step = Step.from_metadata({"a": metadata(torch.zeros(3, 1), [0, 2, 2, 3], [2, 5, 9])}, torch.tensor([0, 1, 8]))
    assert step.request.tolist() == [0, 0, 2]
    assert step.spans == [(0, 2), (2, 2), (2, 3)]


def test_take_narrows_everything_that_is_by_token() -> None:
    tables = {"a": torch.zeros(2, 1)}
    step = Step(
        positions=torch.tensor([5, 6, 7, 0, 1]),
        request=torch.tensor([0, 0, 0, 1, 1]),
        spans=[(0, 3), (3, 5)],
        seq_lens=[8, 2],
        tables=tables,
        is_image=torch.tensor([True, False, True, True, False]),
        routed_as_image=torch.tensor([True, False, True, True, True]),
        cached=torch.tensor([True, True, False, True, True]),
        dp_tokens=[5, 9],
        is_block=True,
        selected=torch.arange(10).view(5, 2),
        candidates=torch.arange(5).view(5, 1),
        engram_rows={3: torch.arange(15).view(5, 3)},
    )
    assert step.rotary(torch.ones(1), compressed=True).cos.shape[0] == 5 and step.first_positions == [5, 0]
    floor = torch.tensor([7, 0])
    taken = step.take(torch.tensor([2, 3, 4]), [(0, 1), (1, 3)], floor)
    assert taken.positions.tolist() == [7, 0, 1] and taken.request.tolist() == [0, 1, 1]
    assert taken.spans == [(0, 1), (1, 3)] and taken.seq_lens == [8, 2] and taken.tables is tables
    assert taken.selected is not None and taken.selected.tolist() == [[4, 5], [6, 7], [8, 9]]
    assert taken.candidates is not None and taken.candidates.tolist() == [[2], [3], [4]]
    assert taken.engram_rows[3].tolist() == [[6, 7, 8], [9, 10, 11], [12, 13, 14]]
    assert taken.is_image is not None and taken.is_image.tolist() == [True, True, False]
    assert taken.routed_as_image is not None and taken.routed_as_image.tolist() == [True, True, True]
    assert taken.cached is not None and taken.cached.tolist() == [False, True, True]
    assert taken.window_floor is floor
    assert taken.dp_tokens == [5, 9] and taken.is_block
    assert taken.rotary(torch.ones(1), compressed=True).cos.shape[0] == 3 and taken.first_positions == [7, 0]
    assert step.num_tokens == 5 and step.window_floor is None


def test_take_leaves_absent_parts_absent() -> None:
    unset: Any = Step(torch.arange(3), torch.zeros(3, dtype=torch.long), [(0, 3)], [3], {})
    taken = unset.take(torch.tensor([2]), [(0, 1)], torch.tensor([2]))
    assert taken.selected is None and taken.candidates is None and taken.engram_rows == {}
    assert taken.is_image is None and taken.routed_as_image is None


def test_images_are_told_by_their_ids() -> None:
    """The router's range is wider than the one id that images have."""
    vision = ModelConfig.from_hf(hf_config(vision={})).vision
    assert vision is not None and vision.image_token_id == 379
    ids = torch.tensor([378, 379, 380, 5, 383, 384, 379])
    step: Any = Step(torch.arange(7), torch.zeros(7, dtype=torch.long), [(0, 7)], [7], {})
    step.mark_images(ids, vision)
    assert step.is_image.tolist() == [False, True, False, False, False, False, True]
    assert step.routed_as_image.tolist() == [False, True, True, False, True, False, True]
