"""DeepSeek-V4.1 on this machine, from nothing to answers.

Writes a tiny checkpoint, serves it with `vllm serve` and this plugin, asks it for a chat completion, about two images,
for a tool call and for JSON, and says what ran. Then it starts two servers on the first one's store and the router
before them, and asks a long question again, of which the store is known to have most before it is routed. The weights
are random: the answers show that the machine works, not what the model knows. Last, a pair that was trained on made-up
texts drafts with DSpark, and the server's metrics say how many drafts stood.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import openai
from PIL import Image
from pydantic import BaseModel, Field

from deepinfer_vllm.checkpoint.create import create
from deepinfer_vllm.demo_drafts import SPECULATIVE_FLAGS, Drafted, continue_texts, write_pair
from deepinfer_vllm.demo_router import Router
from deepinfer_vllm.demo_store import Asked, ask, store_flags
from deepinfer_vllm.models.announce import MARK
from deepinfer_vllm.models.deepseek_v41.errors import CheckpointError
from deepinfer_vllm.server_process import SMALL_CPU_FLAGS, V41_FLAGS, ServerError, ServerProcess

NO_THINKING = {"chat_template_kwargs": {"thinking": False}}


class Forecast(BaseModel):
    """What the JSON-schema completion must parse as."""

    weather: Literal["sun", "rain", "snow"]
    degrees: int = Field(ge=-50, le=50)


GET_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city on the coming days.",
        "strict": True,  # the arguments must follow the schema, not only the form of a call
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Berlin", "Hangzhou", "Paris"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


class DemoError(RuntimeError):
    """An answer is not what was asked for."""


def main(directory: Path, timeout_seconds: float) -> int:
    """Run every step; the exit code. What went wrong is on stderr."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave through the `with` that stops the server
    start = time.monotonic()
    try:
        run(directory, timeout_seconds)
    except (ServerError, DemoError, CheckpointError, OSError, openai.OpenAIError) as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted", file=sys.stderr)
        return 130
    print(f"\nDone in {time.monotonic() - start:.0f} s. All answers were well-formed; nothing runs any more.")
    return 0


def run(directory: Path, timeout_seconds: float) -> None:
    """The demo, step by step."""
    checkpoint = write_checkpoint(directory)
    with empty_store(directory) as flags:
        step("Start `vllm serve` with the plugin and its store")
        with ServerProcess(checkpoint, directory / "server.log", flags) as server:
            client, model = connect(server, timeout_seconds)
            chat(client, model)
            see(client, model)
            call_tool(client, model)
            answer_json(client, model)
            show_what_ran(server)
            first = ask_long(client, model)
            step("Stop the server, and start two on its store, with the router before them")
        serve_fleet(directory, checkpoint, flags, first, timeout_seconds)
    serve_pair(directory, timeout_seconds)
    print(f"stopped; the logs are {', '.join(str(log) for log in sorted(directory.glob('*.log')))}")


def serve_fleet(directory: Path, checkpoint: Path, flags: Sequence[str], first: Asked, timeout_seconds: float) -> None:
    """Two engines and the router: the long question again, whose answer is known."""
    with (
        ServerProcess(checkpoint, directory / "server-1.log", flags) as one,
        ServerProcess(checkpoint, directory / "server-2.log", flags) as other,
    ):
        clients = [connect(server, timeout_seconds) for server in (one, other)]
        for client, model in clients:
            chat(client, model)  # so that its long question, too, is not its first
        router = Router(directory / "kv", checkpoint, [one.url, other.url])
        with router.running(directory / "router.log", timeout_seconds):
            print(f"\ndeepinfer {' '.join(router.commands[1][3:])}")
            print(f"ready at {router.url}, status page at {router.admin}")
            client, model = client_of(router.url)
            again = ask_long(client, model)
            compare(first, again)
            show_routing(router)
            step("Stop all of them")


def serve_pair(directory: Path, timeout_seconds: float) -> None:
    """A trained pair with DSpark: how many tokens a step gives."""
    step("Serve a trained pair with DSpark")
    pair = write_pair(directory / "pair")
    with ServerProcess(pair, directory / "server-pair.log", (*SMALL_CPU_FLAGS, *SPECULATIVE_FLAGS)) as server:
        texts = continue_texts(*connect(server, timeout_seconds))
        print(f"text:     {printable(texts[0][0])}\ngoes on:  {printable(texts[0][1])}")
        show_drafts(Drafted.read(server.url))


def show_drafts(drafted: Drafted) -> None:
    """What of the drafts stood."""
    if not sum(drafted.accepted):
        raise DemoError(f"DSpark: no draft stood, of {sum(drafted.verified)} that were checked")
    each = zip(drafted.accepted, drafted.verified, strict=True)
    shares = [f"{stood / max(1, checked):.0%}" for stood, checked in each]
    print(f"accepted: {drafted.length:.2f} tokens a step over {drafted.verifications} steps, from /metrics")
    print(f"          of the drafts checked at each position, {', '.join(shares)} stood")


def show_routing(router: Router) -> None:
    """What the router knew before it routed."""
    counts = router.counts()
    asked, found = counts.get("checked_tokens_total", 0), counts.get("check_hit_tokens_total", 0)
    if not found:
        raise DemoError(f"router: the store's daemon was asked for {asked:.0f} tokens and knew of none")
    print(f"router:   the store knew of {found:.0f} of {asked:.0f} tokens before the request was routed")


@contextmanager
def empty_store(directory: Path) -> Iterator[tuple[str, ...]]:
    """Flags for a server that starts with an empty store, which is removed in the end."""
    root = directory / "kv"
    shutil.rmtree(root, ignore_errors=True)
    (root / "store").mkdir(parents=True)
    try:
        yield (*V41_FLAGS, *SMALL_CPU_FLAGS, *store_flags(root))
    finally:
        shutil.rmtree(root)


def connect(server: ServerProcess, timeout_seconds: float) -> tuple[openai.OpenAI, str]:
    """A client and the model's name, once the server answers."""
    wait_until_healthy(server, timeout_seconds)
    return client_of(server.url)


def client_of(url: str) -> tuple[openai.OpenAI, str]:
    """A client of whatever answers as vLLM does, and the model's name."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0)
    return client, client.models.list().data[0].id


def write_checkpoint(directory: Path) -> Path:
    """A few MB in DeepSeek's published form: config, tokenizer, sharded weights, Engram tables."""
    step("Write a tiny DeepSeek-V4.1 checkpoint")
    made = create(directory / "checkpoint", vision=True, force=True)
    print(f"{made.directory}: {made.parameters:,} parameters, {made.size_bytes / 1e6:.1f} MB")
    print("Its weights are random, so expect well-formed nonsense below.")
    return made.directory


def wait_until_healthy(server: ServerProcess, timeout_seconds: float) -> None:
    """Dots until the server answers; most of the time goes to imports."""
    print(" ".join(server.command))
    seconds = server.wait_until_healthy(timeout_seconds, lambda _: print(".", end="", flush=True))
    print(f"\nhealthy after {seconds:.0f} s at {server.url}")


def chat(client: openai.OpenAI, model: str) -> None:
    """A streamed chat completion, with its speed."""
    step("Chat completion, streamed")
    question = "What is the capital of France?"
    pieces, arrivals, tokens = [], [], 0
    for chunk in client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_completion_tokens=64,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={**NO_THINKING, "ignore_eos": True},
    ):
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
        if chunk.choices:
            arrivals.append(time.monotonic())
            pieces.append(chunk.choices[0].delta.content or "")
    if tokens != 64 or not "".join(pieces):
        raise DemoError(f"chat: {tokens} tokens came back, 64 were asked for")
    print(f"question: {question}\nanswer:   {printable(''.join(pieces))}")
    print(f"speed:    {tokens / (arrivals[-1] - arrivals[0]):.0f} tokens/s, one request")


def see(client: openai.OpenAI, model: str) -> None:
    """A question about an image, sent as a data URL; a second image must give another answer."""
    step("Chat completion about an image")
    answers = []
    for name, pixels in (("stripes", stripes(1)), ("broad stripes", stripes(12))):
        url = f"data:image/png;base64,{base64.b64encode(pixels).decode()}"
        text, image = {"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": [text, image]}],
            max_completion_tokens=16,
            temperature=0,
            extra_body={**NO_THINKING, "ignore_eos": True},
        )
        answers.append(answer.choices[0].message.content or "")
        tokens = answer.usage.prompt_tokens if answer.usage else 0
        print(
            f"image:    {name}, {len(pixels)} bytes, {tokens} tokens in the prompt\nanswer:   {printable(answers[-1])}"
        )
    if not all(answers) or answers[0] == answers[1]:
        raise DemoError(f"images: the answers must be there and differ: {answers}")


def stripes(width: int) -> bytes:
    """A PNG of 96 x 72 pixels, in black and white columns of that width."""
    file = io.BytesIO()
    image = Image.new("L", (96, 72))
    image.putdata([255 * (x // width % 2) for x in range(96)] * 72)
    image.save(file, "PNG")
    return file.getvalue()


def call_tool(client: openai.OpenAI, model: str) -> None:
    """A required tool call: vLLM's grammar for V4.1's call form holds even random weights to a valid one."""
    step("Tool call, held to its schema by vLLM's grammar")
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "How will the weather be in Paris?"}],
        tools=[GET_WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_completion_tokens=400,
        temperature=0,
        extra_body=NO_THINKING,
    ).choices[0]
    if answer.finish_reason != "tool_calls" or not answer.message.tool_calls:
        raise DemoError(f"tool call: none came back (finish_reason={answer.finish_reason!r}): {answer.message}")
    call = answer.message.tool_calls[0].function
    arguments = json.loads(call.arguments)
    if arguments.keys() != {"city", "days"} or not 1 <= arguments["days"] <= 9:
        raise DemoError(f"tool call: arguments {call.arguments} do not follow the schema")
    print(f"call:     {call.name}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})")


def answer_json(client: openai.OpenAI, model: str) -> None:
    """A completion that must follow a JSON schema; the client library parses and validates it."""
    step("JSON-schema completion")
    answer = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": "How will the weather be in Paris? Answer in JSON."}],
        response_format=Forecast,
        max_completion_tokens=400,
        temperature=0,
        extra_body=NO_THINKING,
    ).choices[0]
    if answer.message.parsed is None:
        raise DemoError(f"JSON: {answer.message.content!r} (finish_reason={answer.finish_reason!r}) does not parse")
    print(f"answer:   {answer.message.content}\nparsed:   {answer.message.parsed!r}")


def show_what_ran(server: ServerProcess) -> None:
    """What the server itself says it built."""
    step("What ran")
    with urllib.request.urlopen(f"{server.url}/version", timeout=10) as answer:
        version = json.load(answer)["version"]
    built = [line.partition(MARK)[2].strip() for line in server.log_text().splitlines() if MARK in line]
    if not built:
        raise DemoError(f"the plugin's model was not built: no line with {MARK!r} in {server.log}")
    print(f"vLLM {version}\n{built[-1]}")


def ask_long(client: openai.OpenAI, model: str) -> Asked:
    """A question after many rules, whose KV cache is worth keeping."""
    step("A question with a long prompt")
    asked = ask(client, model, "What is the capital of France?")
    if not asked.answer:
        raise DemoError("long prompt: no answer came back")
    print(
        f"prompt:   {asked.prompt_tokens} tokens, {asked.hit_tokens} of them found\nanswer:   {printable(asked.answer)}"
    )
    print(f"first token after {asked.seconds:.2f} s")
    return asked


def compare(first: Asked, again: Asked) -> None:
    """What the store gave the second server."""
    step("What the store gave a server that was started later")
    if not again.hit_tokens or first.hit_tokens:
        raise DemoError(
            f"store: {first.hit_tokens} tokens were found at first and {again.hit_tokens} after the restart"
        )
    print(f"found:    {again.hit_tokens} of {again.prompt_tokens} tokens")
    print(f"first token after {again.seconds:.2f} s, {first.seconds:.2f} s without the store's hit")


def step(title: str) -> None:
    """Print the headline of a step."""
    print(f"\n== {title}", flush=True)


def printable(text: str) -> str:
    """`text` without control characters, which random weights like to write."""
    return "".join(c if c.isprintable() else "·" for c in text)
