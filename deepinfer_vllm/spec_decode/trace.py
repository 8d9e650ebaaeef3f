"""Keeps the target's states of whole prompts, as a step of the engine leaves them behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from deepinfer_vllm.spec_decode import trace_files

HELD_BYTES = 4 << 30
"""Of prompts that are not complete; the oldest are given up beyond it."""


class Trace:
    """Collects prompts chunk by chunk and writes each as it is complete. For the runner's thread.

    Only prompts: a trainer wants states of every token of a text, and an engine computes those of an answer most
    simply as part of a prompt. A prompt of which part came from a prefix cache has no states for it and is left out.
    Writing happens within the step: a trace is made by an engine that does nothing else.
    """

    def __init__(self, directory: Path, limit_bytes: int, say: Callable[[str], None]) -> None:
        """Texts go to `directory`, which is there, until they have `limit_bytes`. `say` gets a line if no more can."""
        self._directory, self._limit_bytes, self._say = directory, limit_bytes, say
        self._held: dict[str, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {}
        self._held_bytes = 0
        self.written_bytes = self.texts = 0
        self.full = False

    def observe(self, batch: Any, states: list[torch.Tensor], last: torch.Tensor) -> None:
        """vLLM's input batch of a step, the states [T, hidden] of each target layer, and those after the final norm."""
        if self.full or not batch.has_prefill:
            return
        ends = batch.query_start_loc.tolist()
        for row in range(batch.num_reqs):
            if batch.is_prefilling_np[row]:
                start, name = int(batch.num_computed_tokens_np[row]), batch.req_ids[row]
                rows = slice(ends[row], ends[row + 1])
                chunk = (batch.input_ids[rows], torch.cat([s[rows] for s in states], dim=-1), last[rows])
                self._add(name, start, tuple(tensor.cpu().clone() for tensor in chunk))
                if start + len(chunk[0]) >= batch.prefill_len_np[row]:
                    self._write(name)

    def _add(self, name: str, start: int, chunk: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        held = self._drop(name)
        if start == 0:  # again, if it was preempted
            held = []
        if sum(len(ids) for ids, _, _ in held) == start:
            self._held[name] = [*held, chunk]
            self._held_bytes += _bytes(self._held[name])
        while self._held_bytes > HELD_BYTES:
            self._drop(next(iter(self._held)))

    def _drop(self, name: str) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        chunks = self._held.pop(name, [])
        self._held_bytes -= _bytes(chunks)
        return chunks

    def _write(self, name: str) -> None:
        chunks = self._drop(name)
        if not chunks:
            return
        if self.written_bytes + _bytes(chunks) > self._limit_bytes:
            return self._stop(f"the limit of {self._limit_bytes / 1e9:g} GB is reached")
        try:
            parts = [torch.cat(tensors) for tensors in zip(*chunks, strict=True)]
            self.written_bytes += trace_files.write_text(self._directory, self.texts, name, *parts)
            self.texts += 1
        except OSError as error:
            self._stop(error.strerror or str(error))

    def _stop(self, reason: str) -> None:
        self.full = True
        self._held.clear()
        self._say(f"The trace in {self._directory} ends after {self.texts} texts: {reason}.")


def _bytes(chunks: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> int:
    return sum(tensor.nbytes for chunk in chunks for tensor in chunk)
