"""One engine in a process of its own, asked over pipes, so that engines can be fresh, and can run beside each other."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

CHUNK_TOKENS = 2048
SCRIPT = Path(__file__).parent.parent / "kvstore_engine.py"


class Engine:
    """A context manager. `store` is the store's root, None for an engine without it."""

    def __init__(self, checkpoint: Path, max_tokens: int, store: Path | None) -> None:
        self._arguments = [str(checkpoint), str(max_tokens), str(store or "")]

    def __enter__(self) -> Engine:
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1"}
        environment.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        command = [sys.executable, str(SCRIPT), "--serve", *self._arguments]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, env=environment, text=True, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
        )
        self._answer()
        return self

    def ask(self, prompt: list[int], tokens: int, *, stores: bool = True) -> dict[str, Any]:
        """Seconds from the prompt's arrival to each of `tokens` tokens; how many of the prompt's were not computed.

        With a store also how long, in seconds, the connector held up steps after the first token, and how many blocks
        were stored: none without `stores`.
        """
        assert self._process.stdin is not None
        print(json.dumps({"prompt": prompt, "tokens": tokens, "stores": stores}), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(
            f"The engine's process ended; run `--serve {shlex.join(self._arguments)}` by hand to see why"
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(checkpoint: str, max_tokens: str, store: str) -> None:
    """The engine's process: a line of JSON out when it is ready, then one for each line in."""
    from vllm import LLM, SamplingParams

    transfer = None
    if store:
        extra = {"root": store, "capacity_bytes": 1 << 30}
        transfer = {
            "kv_connector": "DeepInfer3FSConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    llm = LLM(
        checkpoint,
        dtype="bfloat16",
        enforce_eager=True,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        max_model_len=int(max_tokens),
        max_num_batched_tokens=CHUNK_TOKENS,
        max_num_seqs=2,
        kv_cache_memory_bytes=1 << 30,
        kv_transfer_config=transfer,
    )
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    own = _Timed(scheduler.connector, ("build_connector_meta", "update_connector_output")) if store else None

    def stored() -> int:
        return int(scheduler.connector.scheduler.manager.secondary_tiers[0]._store.stats().stores)

    print(json.dumps({"ready": True}), flush=True)
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        sampling = SamplingParams(temperature=0, max_tokens=asked["tokens"], ignore_eos=True, detokenize=False)
        arrivals: list[float] = []
        cached, own_before, stored_before = 0, 0.0, 0
        if own:
            scheduler.connector.scheduler.manager.stores = asked["stores"]
            stored_before = stored()
        start = time.perf_counter()
        engine.add_request(str(number), {"prompt_token_ids": asked["prompt"]}, sampling)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            if own and not arrivals:
                own_before = own.seconds
            for output in outputs:
                count = len(output.outputs[0].token_ids)
                arrivals += [time.perf_counter() - start] * (count - len(arrivals))
                cached = output.num_cached_tokens or 0
            if not outputs:
                time.sleep(0.001)  # as vLLM's own loop does while nothing but a load is under way
        own_seconds = own.seconds - own_before if own else 0.0
        while scheduler.has_requests():  # what is still on its way to the store
            engine.step()
            time.sleep(0.001)
        answer = {"arrivals": arrivals, "cached_tokens": cached}
        if own:
            answer |= {"connector_seconds": own_seconds, "stored_blocks": stored() - stored_before}
        print(json.dumps(answer), flush=True)
    engine.engine_core.shutdown()


class _Timed:
    """Adds up what calls of some methods take."""

    def __init__(self, of: Any, names: tuple[str, ...]) -> None:
        self.seconds = 0.0
        for name in names:
            setattr(of, name, self._timed(getattr(of, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = call(*arguments)
            self.seconds += time.perf_counter() - start
            return result

        return timed
