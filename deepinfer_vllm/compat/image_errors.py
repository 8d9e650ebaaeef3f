"""Images that cannot be had are their sender's error."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any


def blame_the_sender() -> None:
    """Answer with status 400 whatever goes wrong while an image is fetched and decoded.

    vLLM answers hosts that do not respond, decompression bombs, file URLs without --allowed-local-media-path and data
    URLs without base64 with a status of 500 and more, as if the server had failed.
    """
    from vllm.multimodal.media.connector import MediaConnector

    if hasattr(MediaConnector, "deepinfer_blames_the_sender"):
        return
    MediaConnector.deepinfer_blames_the_sender = True
    fetch, fetch_async = MediaConnector.fetch_image, MediaConnector.fetch_image_async

    @functools.wraps(fetch)
    def fetch_image(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _errors_of_a_client():
            return fetch(self, *args, **kwargs)

    @functools.wraps(fetch_async)
    async def fetch_image_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _errors_of_a_client():
            return await fetch_async(self, *args, **kwargs)

    MediaConnector.fetch_image, MediaConnector.fetch_image_async = fetch_image, fetch_image_async


@contextlib.contextmanager
def _errors_of_a_client() -> Iterator[None]:
    """Any error becomes one of the request; decoders raise nearly every type there is."""
    from vllm.exceptions import VLLMClientError, VLLMValidationError

    try:
        yield
    except (VLLMClientError, ValueError):  # vLLM answers these with 4xx
        raise
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise VLLMValidationError(f"The image cannot be used: {reason}", parameter="image_url") from error
