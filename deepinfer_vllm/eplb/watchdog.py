"""Whether a rebalancing still goes on. vLLM's asynchronous one ends without a word when its thread has died, and no
other is begun while one has not ended."""

import logging

logger = logging.getLogger("vllm.deepinfer")


class Watchdog:
    """Told of every step; warns once when balancing stalls, and says once when it goes on."""

    def __init__(self, interval: int) -> None:
        """A rebalancing that takes `interval` steps, when the next one was due, has stalled."""
        self._interval = interval
        self._busy_steps = 0
        self.stalled = False

    def step(self, busy: bool, thread_is_dead: bool) -> bool:
        """One step of the engine, `busy` while a rebalancing has begun and not ended; whether `stalled` changed."""
        self._busy_steps = self._busy_steps + 1 if busy else 0
        stalled = thread_is_dead or self._busy_steps > self._interval
        if stalled == self.stalled:
            return False
        self.stalled = stalled
        if stalled:
            why = "its thread is dead" if thread_is_dead else f"a rebalancing has not ended in {self._interval} steps"
            logger.warning(
                "EPLB has stalled: %s. Experts stay where they are; the log above says more. Restart the engine, with "
                "--eplb-config.use_async=false if it happens again.",
                why,
            )
        else:
            logger.info("EPLB goes on.")
        return True
