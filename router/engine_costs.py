"""Costs of prefill by kind of engine."""

from deepinfer_costmodel.cost import Cost, CostError
from deepinfer_costmodel.priors import PRIORS
from deepinfer_costmodel.table import CostTable, read_table
from deepinfer_router.errors import RouterConfigError
from deepinfer_router.prefill_config import PrefillConfig


class EngineCosts:
    """What a prefill takes on each kind of engine."""

    def __init__(self, table: CostTable = PRIORS) -> None:
        """`table`: its set `default` is for kinds that it does not name. Raises RouterConfigError without one."""
        if "default" not in table.costs:
            raise RouterConfigError("costs have no set 'default', for kinds of engines that are not named; add one")
        self._costs = dict(table.costs)
        self._default = table.costs["default"]

    @classmethod
    def from_config(cls, config: PrefillConfig) -> "EngineCosts":
        """With the table of the configuration. Raises RouterConfigError if it cannot be read."""
        if config.costs_file is None:
            return cls()
        try:
            return cls(read_table(config.costs_file))
        except (CostError, OSError) as error:
            raise RouterConfigError(f"prefill.costs_file: {error}") from None

    def of(self, kind: str) -> Cost:
        """Coefficients of engines of that kind."""
        return self._costs.get(kind, self._default)
