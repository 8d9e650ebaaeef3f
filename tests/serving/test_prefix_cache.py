"""vLLM's prefix cache serves V4.1: a repeated prompt is found, and the answer stays the same."""

from tokenizers import Tokenizer

from serving.client import Api


def counter(api: Api, name: str) -> float:
    """The value of a counter in /metrics."""
    lines = api.http.get("/metrics").text.splitlines()
    [value] = [line.rsplit(" ", 1)[1] for line in lines if line.startswith(f"{name}{{")]
    return float(value)


def test_repeated_prompt_hits(api: Api, tokenizer: Tokenizer) -> None:
    text = " ".join(f"Item {i} of the list is {i * 37 % 101}." for i in range(80))
    prompt = tokenizer.encode(text, add_special_tokens=False).ids[:600]
    assert len(prompt) == 600
    first = api.complete(prompt, max_tokens=12, return_token_ids=True)["token_ids"]
    before = counter(api, "vllm:prefix_cache_hits_total")
    second = api.complete(prompt, max_tokens=12, return_token_ids=True)["token_ids"]
    hits = counter(api, "vllm:prefix_cache_hits_total") - before
    assert second == first
    assert 256 <= hits < 600
