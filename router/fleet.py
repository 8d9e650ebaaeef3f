"""The engines, which of them get new work, and what each has."""

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from time import monotonic

from deepinfer_router.engine_spec import EngineSpec
from deepinfer_router.engine_state import GETS_WORK, EngineState
from deepinfer_router.fleet_config import FleetConfig
from deepinfer_router.health import Health, serves
from deepinfer_router.lease import Lease
from deepinfer_router.roles import Role
from deepinfer_router.seconds import countable
from deepinfer_router.target import Engine, Target
from deepinfer_router.work import Work

logger = logging.getLogger(__name__)

_DECODE, _ENCODE = Role.DECODE, Role.ENCODE


class Fleet:
    """The registry of engines by id; each life of one has its own generation, targets and counts.

    The event loop's thread only.
    """

    def __init__(
        self, config: FleetConfig | None = None, *, probed: bool = False, clock: Callable[[], float] = monotonic
    ) -> None:
        """`probed`: somebody calls `alive`, and engines get no work before. `clock`: the loop's, in seconds."""
        self.config = config or FleetConfig()
        self.engines: dict[str, Engine] = {}
        """By id. Read only."""
        self.version = 0
        """Grows whenever an engine comes, goes or changes its state."""
        self.on_room: Callable[[], None] | None = None
        """Called when a lease is given back or an engine changes: those that queue may find a place."""
        self.touched: set[Target] | None = None
        """Targets whose counts leases have changed, where somebody collects and clears them."""
        self.clock = clock
        self._probed = probed
        self._specs: dict[str, EngineSpec] = {}
        self._generations = count(1)
        self._watchers: list[Callable[[], None]] = []
        self._open: dict[Role, dict[str | None, tuple[Target, ...]]] = {}
        self.epoch = 1
        """Another whenever `targets` may answer otherwise than before."""
        self._built = 0
        self._bounded = False
        """Whether some target has a window: what is open then depends on counts."""
        self.health = health = Health(self, clock)
        self.succeeded = health.succeeded
        self.failed = health.failed
        self.pressured = health.pressured
        self.alive = health.alive

    def add(self, spec: EngineSpec) -> Engine:
        """Knows an engine from now on. What is known and equal stays as it is, draining too (see `resume`).

        With another URL or number of ranks it is another life of that engine. The counts of an old life are nobody's.
        """
        id = spec.id or spec.url
        engine = self.engines.get(id)
        if engine is not None and self._specs[id] == spec:
            return engine
        if engine is not None and (engine.url != spec.url or len(engine.targets) != spec.ranks):
            self._forget(engine)
            engine = None
        self._specs[id] = spec
        if engine is None:
            engine = Engine(id, spec.url, generation=next(self._generations), state=EngineState.STARTING)
            engine.targets = [Target(engine, rank) for rank in range(spec.ranks)]
            self.engines[id] = engine
            self.health.know(engine)
        engine.roles = spec.roles
        engine.models = spec.models
        engine.kind = spec.engine_class
        for target in engine.targets:
            target.capacity_tokens = spec.capacity_tokens or target.capacity_tokens
        if engine.state is EngineState.STARTING and not self._probed:
            self.health.start(engine)
        else:
            self.changed()
        return engine

    def remove(self, id: str) -> None:
        """Forgets it. What it has goes on; those leases give back to counts that nobody reads."""
        engine = self.engines.get(id)
        if engine is not None:
            self._forget(engine)
            self.health.keep_last()
            self.changed()

    def drain(self, id: str) -> None:
        """No new work for it: `engine.active` falls to 0."""
        engine = self.engines.get(id)
        if engine is not None and engine.state is not EngineState.DRAINING:
            engine.state = EngineState.DRAINING
            self.health.keep_last()
            self.changed()

    def resume(self, id: str) -> None:
        """A draining engine gets work again, a share that grows."""
        engine = self.engines.get(id)
        if engine is not None and engine.state is EngineState.DRAINING:
            self.health.start(engine)

    def subscribe(self, callback: Callable[[], None]) -> None:
        """`callback()` after each change of `version`. It must not raise."""
        self._watchers.append(callback)

    def serves(self, model: str) -> bool:
        """Whether an engine in any state serves it, or none has been found yet: tells an unknown model from one without
        room."""
        return not self.engines or any(serves(engine, model) for engine in self.engines.values())

    def targets(self, role: Role, model: str = "") -> Sequence[Target]:
        """Those open for new work of this kind; `model` empty: of any. The same tuple until something changes."""
        if self._built != self.epoch:
            self._rebuild()
        by_model = self._open[role]
        found = by_model.get(model)
        return by_model[None] if found is None else found

    def at_work(self, role: Role, model: str = "") -> list[Engine]:
        """Those that get work of this kind, whether or not they have room for more now."""
        engines = self.engines.values()
        return [e for e in engines if e.state in GETS_WORK and role in e.roles and (not model or serves(e, model))]

    def book(self, target: Target, work: Work, stage: Role, seconds: float = 0.0) -> Lease:
        """Counts one hop at `target`. `seconds`: what prefill (or encoding) of it takes there, predicted.

        A prefill holds the prompt, a decode the prompt and its expected output, an encoder no KV tokens.
        """
        prompt_tokens = 0 if stage is _ENCODE else work.prompt_tokens
        kv_tokens = prompt_tokens + work.expected_output if stage is _DECODE else prompt_tokens
        if self._bounded:
            self.epoch += 1
        return Lease(self, target, prompt_tokens, kv_tokens, countable(seconds) if seconds else 0.0)

    def released(self, lease: Lease) -> None:
        """Told by a lease, once, when its counts are given back. Never raises."""
        if self._bounded:
            self.epoch += 1
        if self.touched is not None:
            self.touched.add(lease.target)
        if self.on_room is not None:
            self._room()

    def loads_changed(self) -> None:
        """Peers or polls changed loads: there may be room now."""
        if self._bounded:
            self.epoch += 1
        self._room()

    def windows_changed(self) -> None:
        """What some target may have has changed."""
        self.epoch += 1
        self._room()

    def changed(self) -> None:
        """An engine came, went or changed its state."""
        self.epoch += 1
        self.version += 1
        for watcher in self._watchers:
            watcher()
        self._room()

    def _room(self) -> None:
        if self.on_room is not None:
            try:
                self.on_room()
            except Exception:
                logger.exception("cannot place what waits; it is tried again when the next lease is given back")

    def _forget(self, engine: Engine) -> None:
        engine.state = EngineState.GONE
        del self.engines[engine.id], self._specs[engine.id]
        self.health.forget(engine)

    def _rebuild(self) -> None:
        usable = [engine for engine in self.engines.values() if engine.state in GETS_WORK]
        self._bounded = any(target.window is not None for engine in usable for target in engine.targets)
        models = {model for engine in self.engines.values() for model in engine.models}
        for role in Role:
            able = [engine for engine in usable if role in engine.roles]
            by_model: dict[str | None, tuple[Target, ...]] = {"": _room_in(able)}
            by_model[None] = _room_in(engine for engine in able if not engine.models)
            for model in models:
                by_model[model] = _room_in(engine for engine in able if serves(engine, model))
            self._open[role] = by_model
        self._built = self.epoch


def _room_in(engines: Iterable[Engine]) -> tuple[Target, ...]:
    return tuple(
        target
        for engine in engines
        for target in engine.targets
        if target.window is None or target.own.active < target.window
    )
