"""What balancing did on one rank, handed over with a step's output when there is something to say."""

import threading

from deepinfer_vllm.report_metrics import Report


class BalanceStats:
    """Counts of one worker. Any thread may count; the one that runs the model sets gauges and takes."""

    def __init__(self) -> None:
        self.gauges: dict[str, float] = {}
        self._counters: dict[str, float] = {}
        self._changed = False
        self._lock = threading.Lock()

    def count(self, name: str, number: float) -> None:
        """Add to a counter."""
        with self._lock:
            self._counters[name] = self._counters.get(name, 0) + number
            self._changed = True

    def set(self, name: str, value: float) -> None:
        """Put a gauge."""
        self.gauges[name] = value
        self._changed = True

    def take(self) -> Report:
        """What was counted since the last call, and the gauges as they are; empty if nothing changed."""
        if not self._changed:
            return {}
        with self._lock:
            counters, self._counters, self._changed = self._counters, {}, False
        return {"counters": counters, "gauges": dict(self.gauges), "histograms": {}}
