"""Seeded requests whose prompts take several steps, where generators cannot be rewound by an offset."""

import functools
from typing import Any


def hook_seeded_sampling() -> None:
    """Let runner V1 take back what a seeded request drew for an incomplete prompt also where generators have no offset.

    Without it a seeded request whose prompt takes two steps ends the engine. Called as the model is built.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if hasattr(GPUModelRunner, "deepinfer_generator_states"):
        return
    GPUModelRunner.deepinfer_generator_states = {}
    sample, bookkeep = GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync

    @functools.wraps(sample)
    def sample_and_remember(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        self.deepinfer_generator_states = {i: g.get_state() for i, g in generators.items() if not _has_offset(g)}
        return sample(self, *args, **kwargs)

    @functools.wraps(bookkeep)
    def bookkeep_and_rewind(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators, states = self.input_batch.generators, self.deepinfer_generator_states
        self.input_batch.generators = {
            i: _StateRewind(g, states[i]) if i in states else g for i, g in generators.items()
        }
        try:
            return bookkeep(self, *args, **kwargs)
        finally:
            self.input_batch.generators = generators

    GPUModelRunner._sample = sample_and_remember
    GPUModelRunner._bookkeeping_sync = bookkeep_and_rewind


def _has_offset(generator: Any) -> bool:
    try:
        generator.get_offset()
    except RuntimeError:
        return False
    return True


class _StateRewind:
    """A generator to which any new offset means: back to where it was before this step."""

    def __init__(self, generator: Any, state: Any) -> None:
        self._generator, self._state = generator, state

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        self._generator.set_state(self._state)
