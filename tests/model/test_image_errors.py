"""What goes wrong with an image is told as an error of the request; what vLLM tells so already is left alone."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable

import pytest

from deepinfer_vllm import compat


@pytest.fixture(params=["fetch_image", "fetch_image_async"])
def fetch(request: pytest.FixtureRequest) -> Callable[[str], object]:
    """Both of vLLM's ways to an image, hooked twice."""
    from vllm.multimodal.media.connector import MediaConnector

    compat.blame_the_sender()
    before = MediaConnector.fetch_image
    compat.blame_the_sender()
    assert MediaConnector.fetch_image is before
    connector = MediaConnector()
    if request.param == "fetch_image":
        return connector.fetch_image
    return lambda url: asyncio.run(connector.fetch_image_async(url))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file:///etc/hostname", "allowed-local-media-path"),
        ("data:image/png,abc", "Only base64 data URLs"),
    ],
)
def test_as_the_requests_error(fetch: Callable[[str], object], url: str, reason: str) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=reason) as error:
        fetch(url)
    assert str(error.value).startswith("The image cannot be used: ") and error.value.parameter == "image_url"


def test_a_value_error_stays(fetch: Callable[[str], object]) -> None:
    not_an_image = base64.b64encode(b"hello").decode()
    with pytest.raises(ValueError, match="Failed to load image"):
        fetch(f"data:image/png;base64,{not_an_image}")
