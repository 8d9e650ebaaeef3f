"""What answers and faults make of an engine: its state, and how much it may have."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from deepinfer_router.breaker import Breaker
from deepinfer_router.engine_state import GETS_WORK, EngineState
from deepinfer_router.metrics import counter
from deepinfer_router.target import Engine

if TYPE_CHECKING:
    from deepinfer_router.fleet import Fleet

logger = logging.getLogger(__name__)

_OPENED = counter("circuits_opened", "Times that an engine was left alone after faults.").labels()
_HALVED = counter("engines_pressured", "Times that what an engine may have was halved after a 429 or 503.").labels()
_HALVED_AT_MOST_EVERY_S = 1.0
_NEVER = float("-inf")


class _Record:
    """What is remembered of one life of an engine."""

    __slots__ = ("breaker", "pressured_at", "unreachable")

    def __init__(self, breaker: Breaker) -> None:
        self.breaker = breaker
        self.pressured_at = _NEVER
        self.unreachable = False
        """No connection, when it was last asked for one."""


class Health:
    """Passive health of a fleet's engines: each is told of every answer and fault. The event loop's thread only.

    Faults (no connection, reset, 5xx other than 503, a stall) open the engine's circuit; 429 and 503 are pressure and
    bound how much it may have; other 4xx say nothing, for the front end alone answers them. An engine without which a
    role of a model had none, or none to which there is a connection, is never left alone: it stays, with one request at
    a time.
    """

    def __init__(self, fleet: "Fleet", clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._config = fleet.config
        self._clock = clock
        self._records: dict[Engine, _Record] = {}

    def know(self, engine: Engine) -> None:
        """A new life of an engine."""
        self._records[engine] = _Record(Breaker(self._config))

    def forget(self, engine: Engine) -> None:
        """It is gone: what is still told of it is not heard."""
        self._records.pop(engine, None)

    def start(self, engine: Engine) -> None:
        """It gets work, a share that grows: an empty engine would win every pick."""
        until = self._clock() + self._config.slow_start_s
        for target in engine.targets:
            target.uncertain_until = until
            target.window = None
        engine.state = EngineState.READY
        self._fleet.changed()

    def succeeded(self, engine: Engine) -> None:
        """It served a request, whole, with a status below 400."""
        record = self._records.get(engine)
        if record is None:
            return
        record.unreachable = False
        if record.breaker.level:
            record.breaker.succeeded()
        state = engine.state
        if state is EngineState.HALF_OPEN or state is EngineState.STARTING:
            record.breaker.close()
            self.start(engine)
            return
        if state is EngineState.SUSPECT:
            self._absolve(engine, record)
        if engine.targets[0].window is not None:
            self._widen(engine, record)

    def failed(self, engine: Engine, kind: str, *, unreachable: bool = False) -> None:
        """A fault. `kind`: what it was, for the log. `unreachable`: there was no connection."""
        record = self._records.get(engine)
        if record is None:
            return
        now = self._clock()
        breaker = record.breaker
        cut_off = unreachable and not record.unreachable
        record.unreachable = unreachable
        too_many = breaker.failed(now)
        state = engine.state
        tried = state is EngineState.HALF_OPEN or (state is EngineState.OPEN and now >= breaker.retry_at)
        if tried or (too_many and state in GETS_WORK):
            breaker.open(now)
            if self._is_last(engine):
                self._keep_one(engine, record, now)
            else:
                _OPENED.inc()
                logger.warning("engine %s left alone for %.2g s after: %s", engine.id, breaker.retry_at - now, kind)
                self._set(engine, EngineState.OPEN)
        elif state is EngineState.READY:
            self._set(engine, EngineState.SUSPECT)
        if cut_off:
            self.keep_last()

    def pressured(self, engine: Engine) -> None:
        """It answered 429 or 503. Halves what it may have, at most once a second; each success gives one back."""
        record = self._records.get(engine)
        if record is None:
            return
        now = self._clock()
        if now - record.pressured_at < _HALVED_AT_MOST_EVERY_S:
            return
        record.pressured_at = now
        _HALVED.inc()
        for target in engine.targets:
            target.window = max(1, target.own.active // 2)
        self._fleet.windows_changed()

    def alive(self, engine: Engine) -> None:
        """A probe found it well: it starts, or its open circuit lets one request by if the pause is over."""
        record = self._records.get(engine)
        if record is None:
            return
        record.unreachable = False
        if engine.state is EngineState.STARTING:
            self.succeeded(engine)
        elif engine.state is EngineState.SUSPECT:
            self._absolve(engine, record)
        elif engine.state is EngineState.OPEN and self._clock() >= record.breaker.retry_at:
            self._bound(engine, 1)
            self._set(engine, EngineState.HALF_OPEN)

    def retry_at(self, engine: Engine) -> float:
        """When an open circuit is tried again, on the clock; else 0."""
        record = self._records.get(engine)
        return record.breaker.retry_at if record is not None and engine.state is EngineState.OPEN else 0.0

    def keep_last(self) -> None:
        """Engines were removed, drained or lost: an open one without which a role has none is tried at once."""
        for engine, record in list(self._records.items()):
            if engine.state is EngineState.OPEN and self._is_last(engine):
                self._keep_one(engine, record, self._clock())

    def _keep_one(self, engine: Engine, record: _Record, now: float) -> None:
        record.pressured_at = now
        self._bound(engine, 1)
        self._set(engine, EngineState.SUSPECT)

    def _absolve(self, engine: Engine, record: _Record) -> None:
        if not record.breaker.suspicious(self._clock()):
            record.breaker.close()
            self._set(engine, EngineState.READY)

    def _widen(self, engine: Engine, record: _Record) -> None:
        over = self._clock() - record.pressured_at > self._config.pressure_memory_s
        for target in engine.targets:
            target.window = None if over or target.window is None else target.window + 1
        self._fleet.windows_changed()

    def _bound(self, engine: Engine, requests: int) -> None:
        for target in engine.targets:
            target.window = requests
        self._fleet.windows_changed()

    def _set(self, engine: Engine, state: EngineState) -> None:
        if engine.state is not state:
            engine.state = state
            self._fleet.changed()

    def _is_last(self, engine: Engine) -> bool:
        """Whether without it some role of some model would have no engine; one that could be reached last time does
        not go by those that could not."""
        cut_off = self._records[engine].unreachable
        others = [
            other
            for other, record in self._records.items()
            if other is not engine and other.state in GETS_WORK and (cut_off or not record.unreachable)
        ]
        for role in engine.roles:
            able = [other for other in others if role in other.roles]
            if not able or any(not any(serves(other, model) for other in able) for model in engine.models):
                return True
        return False


def serves(engine: Engine, model: str) -> bool:
    """Whether it answers for this name."""
    return not engine.models or model in engine.models
