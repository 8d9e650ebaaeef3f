"""Sizes of images that a library has written, in every API's form, and of what is none."""

import io
from base64 import b64encode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_router.image_size import MOST_PIXELS, pixels

Image = pytest.importorskip("PIL.Image")  # vLLM's; the router has none


def written(kind: str, width: int, height: int, **how: Any) -> str:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (3, 2, 1)).save(file, kind, **how)
    return b64encode(file.getvalue()).decode()


def forms(kind: str, data: str) -> list[dict[str, Any]]:
    url = f"data:image/{kind};base64,{data}"
    return [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "input_image", "image_url": url},
        {"type": "image", "source": {"type": "base64", "media_type": f"image/{kind}", "data": data}},
    ]


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("png", {}),
        ("gif", {}),
        ("jpeg", {}),
        ("jpeg", {"progressive": True, "exif": b"Exif\0\0" + b"x" * 20_000, "comment": b"y" * 9_000}),
        ("webp", {}),
        ("webp", {"lossless": True}),
        ("webp", {"exif": b"Exif\0\0x"}),
    ],
)
def test_sizes_are_read_from_the_head(kind: str, how: dict[str, Any]) -> None:
    data = written(kind, 613, 257, **how)
    assert [pixels(part) for part in forms(kind, data)] == [613 * 257] * 3


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/png,plain"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,é"}},
        {"type": "image", "source": {"type": "url", "url": "http://example.org/a.png"}},
        {"type": "image", "source": 7},
        {"type": "input_audio", "input_audio": {"data": "AAAA"}},
    ],
)
def test_what_tells_no_size(part: dict[str, Any]) -> None:
    assert pixels(part) == 0


def test_a_file_counts_for_no_more_than_an_image_can_be() -> None:
    head = b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR" + b"\x7f\xff\xff\xff" * 2
    assert pixels(forms("png", b64encode(head).decode())[0]) == MOST_PIXELS


@given(
    st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"\xff\xd8", b"RIFF0000WEBPVP8X"]), st.binary(max_size=60)
)
def test_any_bytes(head: bytes, rest: bytes) -> None:
    assert 0 <= pixels(forms("png", b64encode(head + rest).decode())[0]) <= MOST_PIXELS


def test_every_beginning_of_a_file() -> None:
    whole = written("jpeg", 30, 20)
    found = {pixels(forms("jpeg", whole[:end])[0]) for end in range(0, len(whole), 4)}
    assert found == {0, 600}
