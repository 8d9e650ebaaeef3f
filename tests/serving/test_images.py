"""Images over HTTP: forms and sizes that are answered, and what is refused with the server living on."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from PIL import Image

from deepinfer_vllm import demo
from deepinfer_vllm.checkpoint.create import create
from deepinfer_vllm.server_process import SMALL_CPU_FLAGS, V41_FLAGS, ServerProcess
from images import noise
from reference.vision import Vision
from serving.client import MODEL, NO_THINKING, Api, Json
from serving.conftest import START_LIMIT_SECONDS

TEXT_TOKENS = 8  # bos, user, "What is this?" and assistant, around the images
BETWEEN = 1  # the blank line that V4.1's form puts before an image


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny V4.1 with a vision tower."""
    return create(tmp_path_factory.mktemp("seeing") / "tiny", vision=True).directory


@pytest.fixture(scope="module")
def api(seeing: Path) -> Iterator[Api]:
    """A server of its own. vLLM closes the connection after some errors, so none is kept."""
    flags = (*V41_FLAGS, *SMALL_CPU_FLAGS, "--served-model-name", MODEL)
    with ServerProcess(seeing, seeing.parent / "server.log", flags) as process:
        process.wait_until_healthy(START_LIMIT_SECONDS)
        with httpx.Client(base_url=process.url, timeout=120, headers={"Connection": "close"}) as http:
            yield Api(http)
        assert process.is_healthy(), f"a test has brought the server down: {process.log_text()[-4000:]}"


def encoded(image: Image.Image, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


def data_url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def question(*urls: str, text: str = "What is this?") -> Json:
    content: list[Json] = [{"type": "text", "text": text}]
    content += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 6,
        "chat_template_kwargs": NO_THINKING,
    }


def ask(api: Api, *images: Image.Image, form: str = "PNG") -> tuple[str, int]:
    """The answer's text and the prompt's tokens."""
    answer = api.post("/v1/chat/completions", **question(*(data_url(encoded(image, form)) for image in images)))
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]


def refused(api: Api, url: str) -> str:
    status, message = api.refusal("/v1/chat/completions", **question(url))
    assert 400 <= status < 500, message
    return message


@pytest.mark.parametrize("sizes", [[], [(90, 120)], [(90, 120), (30, 30), (600, 200)]], ids=len)
def test_places_of_images_in_the_prompt(api: Api, seeing: Path, sizes: list[tuple[int, int]]) -> None:
    images = [noise(*size, seed=i) for i, size in enumerate(sizes)]
    text, tokens = ask(api, *images)
    vision = Vision(seeing)
    assert tokens == TEXT_TOKENS + sum(vision.grid(*size).places + BETWEEN for size in sizes)
    assert text


def test_answers_depend_on_the_image(api: Api) -> None:
    """Asked twice each, the second time from the prefix cache."""
    answers = [ask(api, noise(90, 120, seed=seed))[0] for seed in (1, 2, 1, 2)]
    assert answers[:2] == answers[2:] and answers[0] != answers[1]


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_forms_of_files(api: Api, form: str) -> None:
    """As the same pixels sent as PNG."""
    image = noise(90, 120)
    decoded = Image.open(io.BytesIO(encoded(image, form))).convert("RGB")
    assert ask(api, image, form=form) == ask(api, decoded)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGBA", "CMYK", "YCbCr", "LAB", "I", "F"])
def test_colours_in_other_modes(api: Api, mode: str) -> None:
    image = noise(90, 120).convert(mode)
    png = mode in ("1", "L", "LA", "P", "RGBA")
    shown = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")) if png else image
    assert ask(api, image, form="PNG" if png else "TIFF") == ask(api, shown.convert("RGB"))


def test_sixteen_bits(api: Api) -> None:
    assert ask(api, Image.new("I;16", (90, 120), 40000))[0]


def test_the_first_picture_of_an_animation(api: Api) -> None:
    file = io.BytesIO()
    first = noise(60, 60).convert("P")
    first.save(file, "GIF", save_all=True, append_images=[noise(60, 60, seed=1).convert("P")])
    animated = api.post("/v1/chat/completions", **question(data_url(file.getvalue(), "image/gif")))
    assert animated["choices"][0]["message"]["content"] == ask(api, first.convert("RGB"))[0]


@pytest.mark.parametrize("size", [(1, 1), (3000, 2000), (5000, 1), (1, 5000), (20000, 3), (7000, 7000)], ids=str)
def test_sizes(api: Api, seeing: Path, size: tuple[int, int]) -> None:
    _, tokens = ask(api, Image.new("RGB", size, (10, 200, 30)))
    assert tokens == TEXT_TOKENS + BETWEEN + Vision(seeing).grid(*size).places <= TEXT_TOKENS + BETWEEN + 128


def test_streamed(api: Api) -> None:
    url = data_url(encoded(noise(90, 120)))
    events = api.events("/v1/chat/completions", **question(url))
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]
    assert "".join(pieces) == ask(api, noise(90, 120))[0]


def test_responses(api: Api) -> None:
    image = {"type": "input_image", "detail": "auto", "image_url": data_url(encoded(noise(90, 120)))}
    message = {"role": "user", "content": [{"type": "input_text", "text": "What is this?"}, image]}
    options = {"max_output_tokens": 6, "reasoning": {"effort": "none"}}
    answer = api.post("/v1/responses", input=[message], **options)
    assert answer["output"][0]["content"][0]["text"] == ask(api, noise(90, 120))[0]
    message["content"][1] = {**image, "image_url": data_url(b"no image")}
    assert api.refusal("/v1/responses", input=[message], **options)[0] == 400


def test_messages(api: Api) -> None:
    def body(content: bytes) -> Json:
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(content).decode()}
        parts = [{"type": "text", "text": "What is this?"}, {"type": "image", "source": source}]
        return {"messages": [{"role": "user", "content": parts}], "max_tokens": 6, "thinking": {"type": "disabled"}}

    answer = api.post("/v1/messages", **body(encoded(noise(90, 120))))
    assert answer["content"][0]["text"] == ask(api, noise(90, 120))[0]
    assert api.refusal("/v1/messages", **body(b"no image"))[0] == 400


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
@pytest.mark.parametrize("kept", [0.0, 0.1, 0.6])
def test_truncated_files(api: Api, form: str, kept: float) -> None:
    whole = encoded(noise(90, 120), form)
    assert "load image" in refused(api, data_url(whole[: int(len(whole) * kept)]))


@pytest.mark.parametrize(
    "content", [b"hello world", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.7", b"\0" * 99]
)
def test_what_is_not_an_image(api: Api, content: bytes) -> None:
    assert "cannot identify image" in refused(api, data_url(content))


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,@@@@",
        "data:image/png,abc",
        "data:image/png;base64",
        "file:///etc/hostname",
        "ftp://localhost/image.png",
        "no url",
        "",
        "http://127.0.0.1:9/refused.png",
        "http://no-such-host.invalid/image.png",
        "http://[broken/image.png",
    ],
)
def test_urls_that_lead_to_no_image(api: Api, url: str) -> None:
    assert refused(api, url)


def test_a_page_that_is_no_image(api: Api) -> None:
    assert "HTTP 404" in refused(api, str(api.http.base_url.join("/nothing.png")))
    assert "cannot identify image" in refused(api, str(api.http.base_url.join("/health")))


def white_png(side: int) -> bytes:
    """A few KB that unpack to side x side pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((side // 8 + 1) * 8))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [20_000, 60_000])
def test_decompression_bombs(api: Api, side: int) -> None:
    assert "pixels) exceeds limit" in refused(api, data_url(white_png(side)))


def test_too_many_tokens_of_images(api: Api) -> None:
    urls = [data_url(encoded(noise(600, 600, seed=i))) for i in range(40)]
    status, message = api.refusal("/v1/chat/completions", **question(*urls))
    assert status == 400 and "maximum context length" in message


def test_other_media(api: Api) -> None:
    for part in (
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": data_url(b"")}},
        {"type": "image_embeds", "image_embeds": "AAAA"},
    ):
        status, _ = api.refusal("/v1/chat/completions", messages=[{"role": "user", "content": [part]}], max_tokens=4)
        assert status == 400


def test_the_placeholder_as_text(api: Api) -> None:
    """A client may write the image token out; it is a token then, and no image."""
    url = data_url(encoded(noise(90, 120)))
    for urls in ((), (url,)):
        assert api.post("/v1/chat/completions", **question(*urls, text="a <｜deepseek_image｜> b"))["choices"]


def test_the_demos_step(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    import openai

    demo.see(openai.OpenAI(base_url=f"{api.http.base_url}/v1", api_key="none", max_retries=0), MODEL)
    assert "answer:" in capsys.readouterr().out
