"""Clients ask a router whose engines fail in every way and whose workers are killed; a wrong answer fails, and a rest.

Answers of mock engines follow from the prompt, so a client knows the right one. Prefill and decode are apart, and
streams are resumed. Each answer is right and whole, or an error that its client sees. When the engines are well again
nothing is left, no request that is counted, running or waiting, no descriptor, no memory; and everything is served.

Example: python tests/soak/router.py --minutes 1
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

DEEPINFER = (sys.executable, "-u", "-m", "deepinfer_vllm.cli.main")
CLIENTS = 12
SETTLE_S = 60.0
REFUSED = (429, 500, 502, 503, 504)
"""What a client may be answered while engines fail."""
MORE_FILES, MORE_MB = 10, 32
FAULTS: tuple[dict[str, Any], ...] = (
    {"kind": "reset_before"},
    {"kind": "reset_mid", "after_events": 3},
    {"kind": "fin_mid", "after_events": 2},
    {"kind": "stall_before"},
    {"kind": "stall_mid", "after_events": 5},
    {"kind": "malformed_chunk", "after_events": 4},
    {"kind": "status", "status": 503},
    {"kind": "status", "status": 429, "retry_after_s": 1},
    {"kind": "status", "status": 500},
    {"kind": "slow_head", "seconds": 0.5},
    {"kind": "huge_headers", "size": 1_000_000},
    {"kind": "close_each"},
    {"kind": "split"},
    {"kind": "unhealthy"},
)
SETTINGS: dict[str, Any] = {
    "listen": "127.0.0.1:0",
    "admin": {"listen": "127.0.0.1:0"},
    "process": {"workers": 2},
    "disaggregation": {"connector": "nixl", "local_tokens": 64},
    "failure": {"resume": True, "stall_s": 1.0, "first_token_s": 1.0, "request_timeout_s": 20.0},
    "fleet": {"backoff_first_s": 0.2, "backoff_most_s": 1.0, "probe_s": 1.0, "probe_soon_s": 0.2, "slow_start_s": 1.0},
    "admission": {"max_wait_s": 5.0},
}


class Case:
    """A request, and its answer."""

    def __init__(self, number: int, chance: random.Random) -> None:
        words = f"{number} " + "word " * chance.choice((5, 40, 400, 1600))
        self.path = "/v1/chat/completions" if number % 2 else "/v1/completions"
        prompt = {"messages": [{"role": "user", "content": words}]} if number % 2 else {"prompt": words}
        tokens = chance.randrange(2, 80)
        self.fields = {"model": "mock", "max_tokens": tokens, "ignore_eos": True, **prompt}
        self.answer = ""

    def text_of(self, choice: dict[str, Any]) -> str:
        """What a choice, or a piece of one, says."""
        said = choice.get("message") or choice.get("delta") or {}
        return str((choice.get("text") if "text" in choice else said.get("content")) or "")


class Soak:
    """Mock engines, a router, and those that ask it."""

    def __init__(self, scratch: Path, chance: random.Random, http: aiohttp.ClientSession) -> None:
        self.scratch = scratch
        self.chance = chance
        self.http = http
        self.counts: Counter[str] = Counter()
        self.ending = False
        self.killed_at = float("-inf")
        self.cases = [Case(number, chance) for number in range(40)]
        self.engines: list[str] = []
        self.url = self.admin = ""

    async def start(self) -> list[subprocess.Popen[str]]:
        """The processes, which the caller ends."""
        command = [*DEEPINFER, "mock-engine", "--engines", "4", "--connector", "nixl", "--lease-s", "3"]
        engines = subprocess.Popen([*command, "--time-scale", "0.2"], stdout=subprocess.PIPE, text=True)
        assert engines.stdout
        self.engines = [engines.stdout.readline().strip() for _ in range(4)]
        roles = ["prefill", "prefill", "decode", "decode"]
        listed = [{"url": url, "roles": [role]} for url, role in zip(self.engines, roles, strict=True)]
        config = self.scratch / "router.json"
        config.write_text(json.dumps({**SETTINGS, "engines": listed}))
        log = (self.scratch / "router.log").open("w")
        router = subprocess.Popen([*DEEPINFER, "router", "--config", str(config)], stderr=log, text=True)
        await until(lambda: "serving at " in self.log(), "the router serves")
        self.url = "http://127.0.0.1:" + self.log().partition("serving at ")[2].partition(",")[0].rpartition(":")[2]
        self.admin = self.log().partition("status page at ")[2].split()[0].rstrip("/")
        for case in self.cases:
            async with self.http.post(self.engines[3] + case.path, json=case.fields) as answer:
                case.answer = case.text_of((await answer.json())["choices"][0])
                assert len(case.answer) == case.fields["max_tokens"]
        return [engines, router]

    def log(self) -> str:
        """What the router has said."""
        return (self.scratch / "router.log").read_text()

    async def client(self) -> None:
        """Asks one thing after another; now and then it leaves."""
        while not self.ending:
            patience = self.chance.uniform(0, 0.5) if self.chance.random() < 0.2 else 60.0
            try:
                async with asyncio.timeout(patience):
                    self.counts[await self.ask(self.chance.choice(self.cases), self.chance.random() < 0.7)] += 1
            except TimeoutError:
                assert patience < 1.0, "a request had no end in a minute"
                self.counts["left"] += 1
            await asyncio.sleep(self.chance.uniform(0, 0.05))

    async def ask(self, case: Case, stream: bool) -> str:
        """How it ended. Raises AssertionError: otherwise than anything may."""
        began = time.monotonic()
        try:
            async with self.http.post(self.url + case.path, json={**case.fields, "stream": stream}) as answer:
                if answer.status != 200:
                    assert answer.status in REFUSED, (answer.status, (await answer.text())[:300])
                    return f"refused {answer.status}"
                if stream:
                    return await self.read(case, answer, began)
                text = case.text_of((await answer.json())["choices"][0])
                assert text == case.answer, ("another answer", text, case.answer)
                return "whole"
        except (aiohttp.ClientError, ConnectionError) as failure:
            return self.lost(began, failure)

    def lost(self, began: float, failure: Exception) -> str:
        """A connection that ended without a word. Raises AssertionError: no worker was killed meanwhile."""
        assert self.killed_at > began - 2.0, ("a connection was lost, and no worker", failure)
        return "lost with its worker"

    async def read(self, case: Case, answer: aiohttp.ClientResponse, began: float) -> str:
        """A stream's end. A client that only reads HTTP sees a body that is not whole where it breaks off."""
        text, done, error = "", False, ""
        try:
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                done = line.strip() == b"data: [DONE]"
                event = {} if done else json.loads(line[6:])
                error = error or str((event.get("error") or {}).get("code", ""))
                text += "".join(case.text_of(choice) for choice in event.get("choices", ()))
        except (aiohttp.ClientError, ConnectionError) as failure:
            assert not done and case.answer.startswith(text), ("a part of another answer", text, case.answer)
            return f"broken off: {error}" if error else self.lost(began, failure)
        assert done and not error and text == case.answer, ("cut in silence, or wrong", error, text, case.answer)
        return "stream"

    async def harm(self) -> None:
        """One engine, or one worker, at random."""
        what, engine = self.chance.random(), self.chance.choice(self.engines)
        if what < 0.04:
            pids = await self.workers()
            if len(pids) > 1:  # some worker always has the port
                self.killed_at = time.monotonic()
                os.kill(self.chance.choice(pids), signal.SIGKILL)
                self.counts["workers killed"] += 1
            return
        fault = {**self.chance.choice(FAULTS), "times": self.chance.randrange(1, 5)}
        try:
            if what < 0.12:
                await self.http.post(f"{engine}/mock/restart?{self.chance.uniform(0, 2):.2f}")
                self.counts["engines killed"] += 1
            else:
                await self.http.post(f"{engine}/mock/faults", json=fault)
                self.counts["faults"] += 1
        except aiohttp.ClientError:  # it is starting again
            self.counts["harm that came too late"] += 1

    async def workers(self) -> list[int]:
        """Of those that serve, the process ids."""
        async with self.http.get(f"{self.admin}/status") as answer:
            return [worker["pid"] for worker in (await answer.json())["workers"] if worker["ready"]]

    async def weigh(self) -> tuple[int, float]:
        """The most files and megabytes of a worker."""
        pids = await self.workers()
        files = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
        return max(files), max(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6

    async def left(self) -> list[str]:
        """What is still counted or running that nobody asked for any more."""
        found = []
        async with self.http.get(f"{self.admin}/engines") as answer:
            for row in await answer.json():
                for rank in row["ranks"]:
                    if rank["active"] or rank["kv_tokens"] or rank["pending_seconds"]:
                        found.append(f"{row['id']}: {rank}")
        for url in self.engines:
            async with self.http.get(f"{url}/mock/state") as answer:
                state = await answer.json()
            if state["running"] or state["leases"]["held"]:
                found.append(f"{url}: {state['running']} running, {state['leases']}")
        async with self.http.get(f"{self.admin}/metrics") as answer:
            for line in (await answer.text()).splitlines():
                name, _, value = line.rpartition(" ")
                waits = name in ("deepinfer_router_admission_waiting", "deepinfer_router_request_buffered_bytes")
                if (waits or name == "deepinfer_router_leases_lost_total") and float(value):
                    found.append(line)
        return found

    async def run(self, seconds: float) -> None:
        """Raises AssertionError, or what a client raised."""
        await self.served(3)
        await asyncio.sleep(5)  # connections to engines that nobody uses are closed by then
        files, megabytes = await self.weigh()
        began = shown = time.monotonic()
        clients = [asyncio.create_task(self.client()) for _ in range(CLIENTS)]
        while (now := time.monotonic()) - began < seconds:
            await asyncio.sleep(self.chance.uniform(0.05, 0.5))
            await self.harm()
            for client in clients:
                if client.done():
                    client.result()
            if now - shown > 10:
                shown = now
                print(f"{now - began:5.0f} s {self.summary()}", flush=True)
        self.ending = True
        await asyncio.gather(*clients)
        await until(self.engines_up, "engines listen again")
        for url in self.engines:
            await self.http.delete(f"{url}/mock/faults")
        deadline = time.monotonic() + SETTLE_S
        while rest := await self.left():
            assert time.monotonic() < deadline, ("left over", rest)
            await asyncio.sleep(0.5)
        await self.served(1)
        await asyncio.sleep(5)
        more_files, more_megabytes = (b - a for a, b in zip((files, megabytes), await self.weigh(), strict=True))
        print(f"{more_files:+d} files and {more_megabytes:+.1f} MB a worker", flush=True)
        assert more_files <= MORE_FILES and more_megabytes <= MORE_MB, "workers have grown"

    async def served(self, times: int) -> None:
        """Everything, streamed and not. Raises AssertionError: not everything is."""
        for case in self.cases * times:
            for stream in (True, False):
                ended = await self.ask(case, stream)
                assert ended == ("stream" if stream else "whole"), ended

    async def engines_up(self) -> bool:
        """Whether all answer."""
        try:
            return all([(await self.http.get(f"{url}/mock/state")).status == 200 for url in self.engines])
        except aiohttp.ClientError:
            return False

    def summary(self) -> str:
        """How requests ended, and what was done to those that serve them."""
        return ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))


async def until(condition: Callable[[], Any], what: str) -> None:
    """Poll. Raises AssertionError after a minute."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        found = condition()
        if await found if asyncio.iscoroutine(found) else found:
            return
        assert time.monotonic() < deadline, f"not within {SETTLE_S:.0f} s: {what}"
        await asyncio.sleep(0.1)


async def soak(scratch: Path, seconds: float, seed: int) -> None:
    """All of it."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    processes: list[subprocess.Popen[str]] = []
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        one = Soak(scratch, random.Random(seed), http)
        try:
            processes += await one.start()
            await one.run(seconds)
        except BaseException:
            print(one.log()[-3000:], file=sys.stderr)
            raise
        finally:
            print(one.summary(), flush=True)
            for process in reversed(processes):
                process.terminate()
                process.wait(60)


def main() -> None:
    """Soak, print a summary; exit code 1 for anything that must not be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument("--seed", type=int, default=None, help="of the harm that is done (default: another each time)")
    args = parser.parse_args()
    if args.minutes <= 0:
        parser.error("--minutes must be above 0")
    seed = random.randrange(1 << 32) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="soak-router-") as scratch:
        asyncio.run(soak(Path(scratch), args.minutes * 60, seed))


if __name__ == "__main__":
    main()
