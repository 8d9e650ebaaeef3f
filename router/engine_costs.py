"""Costs of prefill by kind of engine: from a table or a prior, and fitted to what is observed."""

from deepinfer_costmodel.cost import Cost, CostError
from deepinfer_costmodel.fit import OnlineFit
from deepinfer_costmodel.priors import PRIORS
from deepinfer_costmodel.table import CostTable, read_table
from deepinfer_router.errors import RouterConfigError
from deepinfer_router.prefill_config import PrefillConfig

_APART_S = 0.05  # twenty observations a second tell all that a thousand would
_LONG_S = 1.0  # prompts that take longer are rare, and all count
_WITHOUT_S = 10.0  # after so long without an observation of an idle engine one that waited is taken
_MOST_WAIT = 4.0  # times the own cost: what is left of more is the error of the estimated wait


class EngineCosts:
    """What a prefill takes on each kind of engine. One thread."""

    def __init__(self, table: CostTable = PRIORS, fit: bool = True) -> None:
        """`table`: its set `default` is for kinds that it does not name. Raises RouterConfigError without one."""
        if "default" not in table.costs:
            raise RouterConfigError("costs have no set 'default', for kinds of engines that are not named; add one")
        self._table = table
        self._fit = fit
        self.fits: dict[str, OnlineFit] = {}
        """By kind, of those that were asked for."""
        self._next_at: dict[str, float] = {}
        self._idle_at: dict[str, float] = {}

    @classmethod
    def from_config(cls, config: PrefillConfig) -> "EngineCosts":
        """With the table of the configuration. Raises RouterConfigError if it cannot be read."""
        if config.costs_file is None:
            return cls(fit=config.fit)
        try:
            return cls(read_table(config.costs_file), config.fit)
        except (CostError, OSError) as error:
            raise RouterConfigError(f"prefill.costs_file: {error}") from None

    def of(self, kind: str) -> Cost:
        """Coefficients of engines of that kind, as they are known now."""
        fit = self.fits.get(kind)
        if fit is None:
            costs = self._table.costs
            fit = self.fits[kind] = OnlineFit(costs.get(kind, costs["default"]))
        return fit.cost

    def observe(self, kind: str, q: int, c: int, waited_s: float, seconds: float, now: float) -> None:
        """A prefill of q tokens behind c took `seconds` to its first byte, `waited_s` of them waiting, as estimated.

        Those of engines that had nothing else to do tell the most: others are used only while there are none.
        """
        if not self._fit or (now < self._next_at.get(kind, 0.0) and seconds < _LONG_S):
            return
        predicted_s = self.of(kind).seconds(q, c)
        if waited_s <= 0.0:
            self._idle_at[kind] = now
        elif waited_s > _MOST_WAIT * predicted_s or now < self._idle_at.setdefault(kind, now) + _WITHOUT_S:
            return
        self._next_at[kind] = now + _APART_S
        self.fits[kind].observe(q, c, seconds - waited_s)

    def table(self) -> CostTable:
        """The coefficients as they are now, in the form that `prefill.costs_file` takes."""
        costs, sources = dict(self._table.costs), dict(self._table.sources)
        for kind, fit in self.fits.items():
            if fit.observations:
                costs[kind or "default"] = fit.cost
                sources[kind or "default"] = f"fitted to {fit.observations} prefills, median error {fit.error:.0%}"
        return CostTable(costs, sources)
