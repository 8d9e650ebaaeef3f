"""P-PAS, the public proposal for a prefill budget by pressure, written from its published rules.

vllm-project/vllm#52906 and the repository it names (arXiv 2608.15171, and P-PAS+ of its README): of two budgets of a
step's tokens the smaller one holds while at least two prefills are active (running or waiting) and something decodes;
P-PAS+ also while one prefill runs alone with `LARGE` tokens or more left, and at least two requests decode.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

CAP, LARGE = "CHUNKING_PRESSURE_CAP", "CHUNKING_PRESSURE_LARGE"
"""Environment: the smaller budget; tokens left from which a prefill alone is pressure, empty without the plus."""


class PressureScheduler(Scheduler):
    """vLLM's, with a budget of `--max-num-batched-tokens` or of CAP tokens a step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most, self._cap = self.max_num_scheduled_tokens, int(os.environ[CAP])
        self._large = int(os.environ.get(LARGE) or 0)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """See Scheduler."""
        left = [r.num_prompt_tokens - r.num_computed_tokens for r in self.running]
        prefills = [tokens for tokens in left if tokens > 0]
        decodes = len(left) - len(prefills)
        waiting = sum(r.num_computed_tokens < r.num_prompt_tokens for r in self.waiting)
        pressed = decodes > 0 and len(prefills) + waiting >= 2
        if self._large and len(prefills) == 1 and decodes >= 2:
            pressed = pressed or prefills[0] >= self._large
        self.max_num_scheduled_tokens = self._cap if pressed else self._most
        return super().schedule(throttle_prefills)
