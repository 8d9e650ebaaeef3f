"""One generating request through the mock engine: place, prompt, tokens, and what is given back."""

from __future__ import annotations

import asyncio
from typing import Any

from deepinfer_simulator import engine_tokens as tokens
from deepinfer_simulator.engine_answers import Answer, Choice, Usage
from deepinfer_simulator.engine_config import EngineConfig
from deepinfer_simulator.engine_http import Request
from deepinfer_simulator.engine_rank import Rank, Running
from deepinfer_simulator.engine_requests import Job
from deepinfer_simulator.engine_transfer import Transfer


class Generation:
    """`run` once. Cancelled when the client leaves: places and leases are given back all the same."""

    def __init__(
        self, job: Job, answer: Answer, rank: Rank, transfer: Transfer, config: EngineConfig, name: str
    ) -> None:
        self._job = job
        self._answer = answer
        self._rank = rank
        self._transfer = transfer
        self._config = config
        self._name = name
        self._kv: dict[str, Any] = dict(job.kv or {})
        self._places: list[Running] = []
        self._cached = 0

    async def run(self, request: Request) -> str:
        """Answers `request`; its finish reason. Raises Ended, or CancelledError when the client has left."""
        try:
            if self._job.stream:
                await request.start_events()  # vLLM's head comes at once, its first event with the first token
            await self._compute()
            return await (self._stream(request) if self._job.stream else self._whole(request))
        except BaseException:
            if self._kv.get("do_remote_prefill"):
                # Not awaited: a task that is being cancelled ends now.
                keep = asyncio.get_running_loop().create_task(self._transfer.let_go(self._kv))
                _letting_go.add(keep)
                keep.add_done_callback(_letting_go.discard)
            raise
        finally:
            for place in self._places:
                self._rank.leave(place)

    async def _compute(self) -> None:
        job = self._job
        for prompt in job.prompts:
            place = Running(len(prompt), self._rank.cache.keys(prompt, job.salt), job.priority)
            self._places.append(place)
            await self._rank.place(place)
            fetched = await self._transfer.fetch(self._kv)
            await self._rank.compute(place, fetched)
            self._cached += place.cached_tokens

    async def _whole(self, request: Request) -> str:
        choices = [Choice([], "length") for _ in range(self._count)]
        usage = Usage(0, 0, 0)
        async for index, ids, finish, output in self._tokens():
            choices[index].ids.extend(ids)
            if finish:
                choices[index] = choices[index]._replace(finish=finish)
            usage = self._usage(output)
        finish = choices[0].finish
        await request.answer(200, self._answer.whole(choices, usage, self._finished(finish)))
        return finish

    async def _stream(self, request: Request) -> str:
        if head := self._answer.head():
            await request.events(head)
        last, usage = "length", Usage(0, 0, 0)
        async for index, ids, finish, output in self._tokens():
            usage = self._usage(output)
            last = finish or last
            await request.events(self._answer.token(index, ids, finish))
        await request.events(self._answer.tail(usage, self._finished(last)))
        await request.end_events()
        return last

    async def _tokens(self) -> Any:
        """(choice, ids of this step, finish reason or None, output tokens so far), every choice once a step."""
        job, output = self._job, 0
        models = [self._model(index) for index in range(self._count)]
        left = dict(enumerate(models))
        for number in range(1, job.max_tokens + 1):
            for index, model in tuple(left.items()):
                await self._rank.step(self._places[index // job.n])
                token = model.next()
                output += 1
                ends = token == tokens.EOS and not job.ignore_end
                finish = (
                    ("tool_calls" if job.tool else "stop") if ends else "length" if number == job.max_tokens else None
                )
                if finish:
                    del left[index]
                yield index, [] if ends else [token], finish, output
            if not left:
                return

    def _model(self, index: int) -> tokens.Continuation:
        job = self._job
        if job.said is not None:
            return tokens.Said(job.said)
        return tokens.Continuation(job.prompts[index // job.n], self._config.end_every, index % job.n)

    @property
    def _count(self) -> int:
        return self._job.n * len(self._job.prompts)

    def _usage(self, output: int) -> Usage:
        return Usage(sum(map(len, self._job.prompts)), self._cached, output)

    def _finished(self, finish: str) -> dict[str, Any] | None:
        prompt = len(self._job.prompts[0])
        return self._transfer.computed(self._kv, self._rank, self._name, prompt, finish)


_letting_go: set[asyncio.Task[None]] = set()
