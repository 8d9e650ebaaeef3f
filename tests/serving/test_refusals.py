"""What the model cannot take is the client's error with a message that says why, and the server lives on."""

import base64
import io

import torch

from serving.client import Api, user


def test_too_long_prompt(api: Api) -> None:
    for path, prompt in (
        ("/v1/completions", {"prompt": [5] * 5000}),
        ("/v1/chat/completions", {"messages": [user("water " * 5000)]}),
    ):
        status, message = api.refusal(path, **prompt, max_tokens=4)
        assert status == 400
        assert "maximum context length is 4096 tokens" in message


def test_prompt_embeddings(api: Api) -> None:
    """Engram hashes token ids, which embeddings do not have."""
    file = io.BytesIO()
    torch.save(torch.zeros(4, 128), file)
    embeddings = base64.b64encode(file.getvalue()).decode()
    status, message = api.refusal("/v1/completions", prompt_embeds=embeddings, max_tokens=4)
    assert status == 400
    assert "hash token ids" in message and "Send text or token ids" in message


def test_an_image_for_a_text_model(api: Api) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    status, message = api.refusal("/v1/chat/completions", messages=[{"role": "user", "content": [image]}], max_tokens=4)
    assert status == 400
    assert "At most 0 image" in message


def test_unknown_model(api: Api) -> None:
    status, message = api.refusal("/v1/completions", model="other", prompt="Hello", max_tokens=4)
    assert status == 404
    assert "`other` does not exist" in message


def test_token_outside_the_vocabulary(api: Api) -> None:
    status, message = api.refusal("/v1/completions", prompt=[1024], max_tokens=4)
    assert status == 400
    assert "1024" in message


def test_unknown_reasoning_effort(api: Api) -> None:
    status, message = api.refusal("/v1/chat/completions", messages=[user("Hello")], reasoning_effort="medium")
    assert status == 400
    assert "reasoning_effort must be" in message
