"""Images to embeddings, and prompts that hold them, against the float64 reference."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image

from deepinfer_vllm.checkpoint.bare import BareModel
from deepinfer_vllm.checkpoint.topology import random_config
from deepinfer_vllm.checkpoint.vision import VisionConfig
from deepinfer_vllm.checkpoint.writer import write_checkpoint
from deepinfer_vllm.models.deepseek_v41.config import ConfigError
from images import noise
from reference import load
from reference.vision import Vision, fitted, fitting_grid
from small_model import hf_config
from topologies import assert_same, bare_model

SIZES = [(100, 60), (84, 84), (1, 1), (14, 14), (700, 300), (33, 1000), (2000, 3), (3, 2000), (1, 5000), (640, 640)]
TOWERS = {
    "as the tiny preset": VisionConfig(),
    "one layer, four heads, pairs": VisionConfig(
        num_hidden_layers=1,
        hidden_size=48,
        num_attention_heads=4,
        intermediate_size=40,
        patch_size=8,
        rope_theta=100.0,
        downsample_ratio=2,
        max_image_tokens=50,
        min_pixels=0,
    ),
}


@pytest.fixture(scope="module", params=TOWERS, ids=str)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareModel]:
    directory = tmp_path_factory.mktemp("seeing")
    write_checkpoint(directory, random_config(7, vision=TOWERS[request.param]), seed=1)
    with bare_model(directory) as model:
        yield model


def embed(model: BareModel, images: Sequence[Image.Image]) -> list[torch.Tensor]:
    """As vLLM would: its processor, then the model's hook."""
    from vllm.models.deepseek_v41.common.mm_preprocess import DeepseekV4VLProcessor

    processed = DeepseekV4VLProcessor(model.vllm_config.model_config.hf_config)(images=images)
    with torch.inference_mode():
        return model.model.embed_multimodal(**processed)


def reference_of(model: BareModel) -> Vision:
    return Vision(Path(model.vllm_config.model_config.model))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_processor_is_the_references(seeing: BareModel, size: tuple[int, int]) -> None:
    from vllm.models.deepseek_v41.common.mm_preprocess import DeepseekV4VLProcessor

    image = noise(*size)
    processed = DeepseekV4VLProcessor(seeing.vllm_config.model_config.hf_config)(images=[image])
    patches, grid = reference_of(seeing).patches(image)
    assert processed["vit_grid"].tolist() == [[grid.rows, grid.columns]]
    assert processed["llm_grid"].tolist() == [[grid.merged_rows, grid.merged_columns]]
    assert len(processed["types"]) == grid.places
    assert torch.equal(processed["patches"].flatten(1).double(), patches)


def test_the_releases_sizes() -> None:
    """Any size, from a dot to a panorama, at the release's limits."""
    from vllm.models.deepseek_v41.common.mm_preprocess import DeepseekV4VLProcessor

    release = {"num_hidden_layers": 32, "max_image_tokens": 1024, "min_pixels": 295936}
    processor = DeepseekV4VLProcessor(hf_config(vision=release))
    rng = random.Random(0)
    sizes = [(int(10 ** rng.uniform(0, 3.4)), int(10 ** rng.uniform(0, 3.4))) for _ in range(20)]
    for width, height in [*sizes, (544, 544), (543, 545), (1300, 1300), (1, 3000), (3000, 1)]:
        grid = fitting_grid({**VisionConfig().published(), **release}, width, height)
        processed = processor(images=[Image.new("RGB", (width, height))])
        assert processed["vit_grid"].tolist() == [[grid.rows, grid.columns]], (width, height)
        assert processed["llm_grid"].tolist() == [[grid.merged_rows, grid.merged_columns]], (width, height)
        assert len(processed["types"]) == grid.places <= 1024


def test_the_largest_images_for_sizing_memory(seeing: BareModel) -> None:
    """They take every token an image may have, or but a few; with and without a tokenizer."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    config = seeing.vllm_config.model_config
    processor = MULTIMODAL_REGISTRY.create_processor(config)
    dummies = processor.get_dummy_mm_inputs({"image": 2})
    spans = dummies["mm_placeholders"]["image"]
    limit = config.hf_config.vision_max_n_token
    assert len(spans) == 2 and all(limit - 8 <= span.length <= limit for span in spans)
    assert processor.info.get_mm_max_tokens_per_item(1024, {"image": 2}) == {"image": limit}


def test_a_tokenizer_with_another_image_id(seeing: BareModel) -> None:
    from vllm.multimodal import MULTIMODAL_REGISTRY

    class Other:
        def convert_tokens_to_ids(self, token: str) -> int:
            return 7

    config = seeing.vllm_config.model_config
    with pytest.raises(
        ConfigError, match=f"image_token_id={config.hf_config.image_token_id}: the tokenizer's id .* is 7"
    ):
        MULTIMODAL_REGISTRY.create_processor(config, tokenizer=Other())


def test_embeddings(seeing: BareModel) -> None:
    """All sizes in one call, each as by itself."""
    images = [noise(*size, seed=i) for i, size in enumerate(SIZES)]
    vision = reference_of(seeing)
    for image, got in zip(images, embed(seeing, images), strict=True):
        expected = vision.span(image)
        assert got.shape == expected.shape
        assert float((got - expected).norm() / expected.norm()) <= 1e-5


def test_no_images_no_embeddings(seeing: BareModel) -> None:
    assert seeing.model.embed_multimodal() == []


def test_a_reference_image_is_centred_on_grey() -> None:
    """The reference's own resampling box, by hand."""
    wide = fitted(Image.new("RGB", (4, 2), (9, 9, 9)), 8, 8)
    column = [wide.getpixel((3, y)) for y in range(8)]
    assert column == [(127, 127, 127)] * 2 + [(9, 9, 9)] * 4 + [(127, 127, 127)] * 2


@pytest.mark.parametrize("seed", [6, 7, 16])
def test_prompts_with_images(seed: int, tmp_path: Path) -> None:
    """Two images and text around and between them, also text ids that are routed as images; whole and in chunks."""
    config = random_config(seed, vision=VisionConfig())
    write_checkpoint(tmp_path, config, seed=seed)
    image, vocabulary = config["image_token_id"], config["text_config"]["vocab_size"]
    drawn = torch.Generator().manual_seed(seed)
    with bare_model(tmp_path) as model:
        spans = embed(model, [noise(200, 90), noise(90, 130, seed=1)])
        text = torch.randint(image, (4, 9), generator=drawn)
        ids = torch.cat(
            [
                text[0],
                torch.full((len(spans[0]),), image),
                text[1, :2],
                torch.full((len(spans[1]),), image),
                text[2],
                torch.arange(image + 1, vocabulary),
                text[3],
            ]
        )
        expected = load(tmp_path).forward(ids, images=[span.double() for span in spans])
        assert torch.equal(expected.hidden_states[0][9 : 9 + len(spans[0])], spans[0].double())
        for chunk in (None, 17, 5):
            assert_same(model.prefill(ids, chunk, spans), expected)


def test_a_text_model_takes_the_same_ids_for_text(tmp_path: Path) -> None:
    config = random_config(7)
    write_checkpoint(tmp_path, config, seed=7)
    ids = torch.arange(config["text_config"]["vocab_size"])
    with bare_model(tmp_path) as model:
        assert not hasattr(model.model, "vision")
        assert_same(model.prefill(ids), load(tmp_path).forward(ids))
