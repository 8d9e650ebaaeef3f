"""The process that the operator starts: keeps the workers alive, tells them of engines, and answers the admin port.

It serves no request, so that nothing a request does can keep /health from answering; and when it dies, its workers'
channels close, whereupon they finish what they have and end.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM
from threading import Lock
from time import monotonic, time
from typing import Any

from deepinfer_router.autoscale import Autoscale
from deepinfer_router.autoscale_stage import Limits
from deepinfer_router.boot import Boot
from deepinfer_router.channel import Message
from deepinfer_router.engine_gauges import EngineGauges
from deepinfer_router.exposition import merge, only_growing
from deepinfer_router.file_stamp import stamp
from deepinfer_router.fleet_view import merged_engines
from deepinfer_router.metrics import Registry, Snapshot
from deepinfer_router.poller import Poller
from deepinfer_router.reload import Reading
from deepinfer_router.worker_process import WorkerProcess

REPORT_INTERVAL_S = 2.0
FIRST_BACKOFF_S = 0.1
MOST_BACKOFF_S = 10.0
START_S = 120.0
"""A worker that loads and has a first look at its engines may be silent for so long."""
SETTLED_S = 30.0
"""A worker that lived so long is restarted at once when it dies."""
ENOUGH_FAILURES = 5
"""Of every worker, in a row: then something is wrong that time does not heal."""
KILL_AFTER_S = 5.0
"""Workers have so long beyond their grace to end."""


class Supervisor:
    """Workers and what they are told. On the poller's thread, where nothing else is said."""

    def __init__(self, boot: Boot, poller: Poller) -> None:
        self.boot = boot
        self._config = boot.config
        self._reloading: Reading | None = None
        self.draining = False
        self.started_at = time()
        self._poller = poller
        self._workers: dict[int, WorkerProcess] = {}
        self._engines: dict[str, list[Message]] = {"configuration": boot.engines}
        self._drained: set[str] = set()
        self._complaints: dict[str, str] = {}
        self._failures: dict[int, int] = {}
        self._was_ready = False
        self._buried: Snapshot = []
        self._waiting: list[tuple[set[WorkerProcess | None], float, Callable[[bool], None]]] = []
        self._exit_code = 0
        self._stamp = stamp(Path(boot.source["path"])) if boot.source["path"] else None
        self.registry = Registry()
        self._restarts = self.registry.counter("worker_restarts", "Workers that ended and were replaced.").labels()
        self._hung = self.registry.counter("worker_hung", "Workers killed because their loop was stuck.").labels()
        self._reloads = self.registry.counter("reloads", "Reloads of the configuration, by result.", "result")
        self._source_errors = self.registry.counter("discovery_errors", "Failures to ask for engines.", "source")
        self._found = self.registry.gauge("discovery_engines", "Engines that a source knows.", "source")
        self._engine_gauges = EngineGauges(self.registry)
        self._autoscale = Autoscale(Limits(**boot.autoscale), self.registry) if boot.autoscale else None
        self._looking = Lock()
        workers = self.registry.gauge("workers", "Worker processes by state.", "state")
        self._ready_gauge, self._other_gauge = workers.labels("ready"), workers.labels("not_ready")

    def run(self) -> int:
        """Until SIGTERM or SIGINT and the end of all requests, or until workers could not be started; the exit code."""
        self._poller.on_signal(SIGTERM, self.drain)
        self._poller.on_signal(SIGINT, self.drain)
        self._poller.on_signal(SIGHUP, self.reload)
        for index in range(self.boot.workers):
            self._start(index)
        self._tick()
        self._poller.run()
        return self._exit_code

    # --- what others want of it

    def found(self, source: str, engines: list[Message]) -> None:
        """`source` knows exactly these engines from now on. From any thread."""

        def take() -> None:
            self._complaints.pop(source, None)
            if self._engines.get(source) != engines:
                say(f"{source}: {len(engines)} engines")
                self._engines[source] = engines
                self._tell({"op": "engines", "source": source, "engines": engines})
            self._found.labels(source).set(len(engines))

        self._poller.call(take)

    def failed(self, source: str, line: str) -> None:
        """`source` could not be asked; what it said before holds. From any thread."""

        def take() -> None:
            self._source_errors.labels(source).inc()
            if self._complaints.get(source) != line:
                self._complaints[source] = line
                say(f"{line}; engines stay as they are")

        self._poller.call(take)

    def drain_engine(self, engine: str, on: bool) -> None:
        """Give an engine no new work, or work again. From any thread."""

        def take() -> None:
            (self._drained.add if on else self._drained.discard)(engine)
            self._tell({"op": "drain", "engine": engine, "on": on})

        self._poller.call(take)

    def drain(self) -> None:
        """Not ready from now on; finish what there is and end. A second time: at once."""
        if self.draining:
            self._end_all()
            return
        self.draining = True
        grace_s = self.boot.unready_s + self.boot.drain_s
        say(f"ends: what is under way has {grace_s:g} s; a second signal ends it at once")
        self._poller.later(self.boot.unready_s, self._stop_workers)

    def reload(self) -> None:
        """Read the configuration again, in a process of its own. What is wrong is said, and all stays as it is."""
        self._tell({"op": "reopen"})
        if self._reloading is None and not self.draining:
            self._reloading = Reading(self._poller, self.boot.source, self._config, self._loaded)

    def fresh_reports(self, patience_s: float) -> list[Message]:
        """As `reports`, once every worker that serves has answered, or time is up. From other threads only."""

        def ask(answer: Callable[[bool], None]) -> None:
            asked: set[WorkerProcess | None] = {worker for worker in self._workers.values() if worker.ready}
            self._waiting.append((asked, monotonic() + patience_s, answer))
            self._tell({"op": "report"}, only_ready=True)
            self._settle()

        self._poller.ask(ask, patience_s)
        return self.reports()

    def why_unhealthy(self) -> str:
        """Empty while some worker lives and answers, or is just being started. From any thread."""
        silent = [report["silent_s"] for report in self.reports()]
        if silent and min(silent) > self.boot.hung_s:
            return f"no worker has answered for {min(silent):.0f} s"
        if not silent and min(self._failures.values(), default=0) > ENOUGH_FAILURES:
            return "workers end as soon as they are started"
        return ""

    def reports(self) -> list[Message]:
        """What each living worker said last, with `worker`, `pid`, `ready` and `silent_s`. From any thread."""
        now = monotonic()
        return [
            {
                **(worker.report or {}),
                "worker": worker.index,
                "pid": worker.pid,
                "ready": worker.ready,
                "silent_s": now - worker.heard_at,
            }
            for worker in list(self._workers.values())
        ]

    def autoscale(self, reports: list[Message]) -> dict[str, Any]:
        """How many engines there should be, by what workers said; empty where nothing is to be recommended."""
        if self._autoscale is None:
            return {}
        said = [report["status"] for report in reports if "status" in report]
        engines = merged_engines(report["engines"] for report in reports if "engines" in report)
        with self._looking:
            return self._autoscale.update(engines, said, monotonic())

    def metrics(self) -> Snapshot:
        """Of all workers, those that died included, and of itself. From any thread."""
        with self._looking:
            reports = self.reports()
            ready = sum(report["ready"] for report in reports)
            self._ready_gauge.set(ready)
            self._other_gauge.set(self.boot.workers - ready)
            self._engine_gauges.show(merged_engines(report["engines"] for report in reports if "engines" in report))
            living = [report["metrics"] for report in reports if "metrics" in report]
            return merge([*living, self._buried, self.registry.snapshot()])

    # --- workers

    def _start(self, index: int) -> None:
        if self.draining:
            return
        try:
            worker = WorkerProcess(index, self._poller, self._heard, self._ended, self.boot.worker_command)
        except OSError as error:
            say(f"worker {index} cannot be started: {error.strerror or error}")
            self._again(index)
            return
        self._workers[index] = worker
        worker.send(
            {
                "op": "start",
                "index": index,
                "workers": self.boot.workers,
                "config": self._config,
                "listen": self.boot.listen,
                "engines": self._engines,
                "drained": sorted(self._drained),
            }
        )

    def _heard(self, worker: WorkerProcess, message: Message) -> None:
        operation = message.pop("op")
        if operation == "report":
            worker.report = message
            self._lead(worker)
            self._settle(worker)
        elif operation == "ready":
            worker.ready = True
            if not self._was_ready and all(worker.ready for worker in self._workers.values()):
                self._was_ready = True
                host, port = self.boot.listen
                say(f"serving at {host}:{port}, workers: {self.boot.workers}")
        elif operation == "failed":
            say(message["line"])
            if not self._was_ready:
                self._exit_code = 1
                self._end_all()
        elif operation == "refused":
            say(message["line"])

    def _lead(self, worker: WorkerProcess) -> None:
        """All serve context lengths by the engines that the first of them has chosen."""
        first = next((other for _, other in sorted(self._workers.items()) if other.ready), None)
        cuts = worker.report["status"].get("cuts") if worker.report else None
        if worker is first and cuts:
            for other in self._workers.values():
                if other.ready and other is not worker:
                    other.send({"op": "follow", "cuts": cuts})

    def _loaded(self, message: Message) -> None:
        self._reloading = None
        if "line" in message:
            self._reloads.labels("refused").inc()
            say(f"not reloaded: {message['line']}")
            return
        self._reloads.labels("ok").inc()
        self._config = message["config"]
        self._tell({"op": "apply", "config": self._config})
        self.found("configuration", message["engines"])
        fixed = message["needs_restart"]
        say("reloaded" + (f"; these need a restart: {', '.join(fixed)}" if fixed else ""))

    def _ended(self, worker: WorkerProcess) -> None:
        del self._workers[worker.index]
        self._settle(worker)
        if worker.report:
            self._buried = merge([self._buried, only_growing(worker.report["metrics"])])
        if self.draining or self._exit_code:
            if not self._workers:
                self._poller.stop()
            return
        say(f"worker {worker.index} (pid {worker.pid}) ended: {worker.how_it_ended}; it is started again")
        self._restarts.inc()
        if monotonic() - worker.started_at > SETTLED_S:
            self._failures[worker.index] = 0
        self._again(worker.index)

    def _again(self, index: int) -> None:
        failures = self._failures.get(index, 0)
        self._failures[index] = failures + 1
        if not self._was_ready and failures >= ENOUGH_FAILURES:
            say(f"worker {index} has ended {failures + 1} times before it served: given up")
            self._exit_code = 1
            self._end_all()
            return
        self._poller.later(min(FIRST_BACKOFF_S * 2**failures, MOST_BACKOFF_S), lambda: self._start(index))

    def _tick(self) -> None:
        now = monotonic()
        for worker in self._workers.values():
            patience_s = self.boot.hung_s if worker.ready else max(self.boot.hung_s, START_S)
            if now - worker.heard_at > patience_s and not self.draining:
                say(f"worker {worker.index} (pid {worker.pid}) has not answered for {patience_s:g} s: killed")
                self._hung.inc()
                worker.kill()
        self._tell({"op": "report"}, only_ready=True)
        self._settle()
        if self.boot.source["path"] and (changed := stamp(Path(self.boot.source["path"]))) != self._stamp:
            self._stamp = changed
            self.reload()
        self._poller.later(REPORT_INTERVAL_S, self._tick)

    def _stop_workers(self) -> None:
        self._tell({"op": "stop", "grace_s": self.boot.drain_s})
        if not self._workers:
            self._poller.stop()
        self._poller.later(self.boot.drain_s + KILL_AFTER_S, self._end_all)

    def _end_all(self) -> None:
        for worker in self._workers.values():
            worker.kill()
        if not self._workers:
            self._poller.stop()

    def _tell(self, message: Message, *, only_ready: bool = False) -> None:
        for worker in self._workers.values():
            if worker.ready or not only_ready:
                worker.send(message)

    def _settle(self, heard: WorkerProcess | None = None) -> None:
        """Answer those who wait for reports that have all come, or for whom time is up."""
        now = monotonic()
        waiting, self._waiting = self._waiting, []
        for asked, until, answer in waiting:
            asked.discard(heard)
            if asked and now < until:
                self._waiting.append((asked, until, answer))
            else:
                answer(not asked)


def say(line: str) -> None:
    """A line to the operator."""
    print(f"deepinfer: router: {line}", file=sys.stderr, flush=True)
