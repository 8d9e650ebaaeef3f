"""A prompt computed by one engine and continued by another: the answer is that of one engine doing both."""

import os
import subprocess
import sys
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from deepinfer_vllm.checkpoint.backends import EngineBackend
from engine.harness import GOLDEN, golden_prompts
from engine.kvstore import ask, engine_on, finish_stores, forget, tier_of
from engine.llama import write_llama

BLOCK = 32


@pytest.fixture(scope="module", params=["llama", "v41"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain model, and one with windows and replay."""
    if request.param == "llama":
        return write_llama(tmp_path_factory.mktemp("model") / "llama")
    return GOLDEN / "v41-tiny-a"


def prompts() -> list[list[int]]:
    ids = golden_prompts("v41-tiny-a")[4].input_ids.tolist()
    return [ids, ids[1:166]]


def stored_blocks(backend: EngineBackend) -> int:
    return len(tier_of(backend)._store.index.entries(limit=10_000))


def handed_over(tokens: int) -> dict[str, object]:
    return {"extra_args": {"kv_transfer_params": {"kvstore": {"stored_tokens": tokens}}}}


def test_decode_engine_continues_what_a_prefill_engine_stored(checkpoint: Path, tmp_path: Path) -> None:
    whole, parts = {}, {}
    more: dict[str, Any] = {"replay": True} if "v41" in checkpoint.name else {}
    more["extra"] = {"pd_wait_s": 60}
    with engine_on(checkpoint, tmp_path / "root", kv_role="kv_producer", **more) as producer:
        for number, prompt in enumerate(prompts()):
            output = producer._run([prompt], 16)[0]
            whole[number] = list(output.outputs[0].token_ids)
            # What is answered can be read by others: no further step was needed.
            parts[number] = output.kv_transfer_params["kvstore"]["stored_tokens"]
            assert parts[number] == (len(prompt) - len(prompt) % BLOCK)
            assert stored_blocks(producer) >= parts[number] // BLOCK
        before = stored_blocks(producer)
        forget(producer)
        assert ask(producer, prompts()[0]) == (whole[0], 0)  # it does not load
        assert before == stored_blocks(producer) > 0
        assert producer.scheduler.connector.answer_gate.late == 0
    with engine_on(checkpoint, tmp_path / "root", kv_role="kv_consumer", **more) as consumer:
        for number, prompt in enumerate(prompts()):
            answer = ask(consumer, prompt, **handed_over(parts[number]))
            assert answer == (whole[number], (len(prompt) - 1) // BLOCK * BLOCK)
        finish_stores(consumer)
        assert stored_blocks(consumer) == before  # it does not store
        assert consumer.scheduler.connector._arrivals.missed == 0


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model") / "llama")


def prefill_when_told(checkpoint: str, root: str) -> None:
    """The other engine's process."""
    with engine_on(Path(checkpoint), Path(root), kv_role="kv_producer") as producer:
        print("ready", flush=True)
        sys.stdin.readline()
        print("answer", *ask(producer, prompts()[0])[0], flush=True)


def test_a_request_waits_for_blocks_and_not_for_ever(llama: Path, tmp_path: Path) -> None:
    """The decode engine is asked first; its request finds what the prefill engine stores meanwhile, or does without."""
    root = tmp_path / "root"
    root.mkdir()
    command = [sys.executable, "-m", "engine.test_handover", str(llama), str(root)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as producer:
        assert producer.stdin is not None and producer.stdout is not None
        try:
            assert any(line.startswith("ready") for line in producer.stdout)
            with engine_on(llama, root, kv_role="kv_consumer", extra={"pd_wait_s": 60}) as consumer:
                told = Timer(0.3, lambda: (producer.stdin.write("go\n"), producer.stdin.flush()))  # type: ignore[union-attr]
                told.start()
                waited = ask(consumer, prompts()[0], **handed_over(256))
                answer = next(line for line in producer.stdout if line.startswith("answer"))
                assert waited == ([int(token) for token in answer.split()[1:]], 256)
                arrivals = consumer.scheduler.connector._arrivals
                assert arrivals.missed == 0
                arrivals._patience_seconds = 0.2
                missing = prompts()[0][::-1]
                alone = ask(consumer, missing)
                assert ask(consumer, missing[1:], **handed_over(224))[1] == 0
                assert arrivals.missed == 1
                assert ask(consumer, missing, **handed_over(224)) == (alone[0], 256)
        finally:
            producer.kill()


if __name__ == "__main__":
    prefill_when_told(*sys.argv[1:])
