"""What a step has room for beside its decodes. Pure: knows neither vLLM nor a clock."""

from collections.abc import Sequence
from math import inf

from deepinfer_costmodel.step import Load, StepCost
from deepinfer_vllm.scheduling.cuts import Cuts
from deepinfer_vllm.scheduling.settings import Settings


class StepPlan:
    """Cuts chunks for one step, in the order in which the scheduler comes by its requests.

    The first chunk of a step is there whatever it costs, down to one piece of the grid: so the oldest prompt goes on in
    every step. Each call takes some microseconds.

    Where the target leaves chunks less than their least share, they get that. Of a step that takes F by itself and for
    its first chunk, tokens that take v on top are v / (F + v) of the prefill that the largest chunk could bring, or
    more, as seconds a token only rise with a chunk: a share of s asks for v = F s / (1 - s).
    """

    def __init__(
        self, settings: Settings, cost: StepCost, decodes: Load, *, tail: float = 1.0, tokens: int = 1 << 40
    ) -> None:
        """decodes: what runs anyway; tail: what to expect of the slow ones among steps that should take 1; tokens: of
        all chunks beside decodes, where no more is known."""
        self._settings, self._cost = settings, cost
        self._tokens_left = tokens if decodes.decodes else 1 << 40
        self._context_left = settings.most_context
        self._piece_s = cost.prefill.seconds(settings.grid, 0) - cost.step
        self.decodes = decodes
        self.room_s = inf
        """Seconds left for chunks; without a decode nobody waits for the step's end."""
        self.least_s = 0.0
        """Seconds of a step that chunks get whatever the target."""
        self.beyond_target = False
        """Whether chunks get their least share of the step, for which the target has no room."""
        if decodes.decodes:
            decodes_s, chunk_s = cost.seconds(decodes), cost.prefill.alpha - cost.step
            self.room_s = settings.target_s / tail - decodes_s
            share = settings.least_share
            self.least_s = chunk_s + (decodes_s + chunk_s) * share / (1 - share)
            if self.room_s < self.least_s:
                self.room_s, self.beyond_target = self.least_s, True
        self.chunks: dict[str, tuple[int, int]] = {}
        """By request: position of its first token, and tokens."""

    @property
    def full(self) -> bool:
        """Whether no further prompt fits, however short what is left of it is cut."""
        if not self.chunks:
            return False
        return self.room_s < self._piece_s or self._context_left <= 0 or self._tokens_left < self._settings.grid

    def tokens(self, start: int, most: int, cuts: Cuts, *, final: bool, encoded: Sequence[tuple[int, int]] = ()) -> int:
        """How many tokens of a prompt to compute from `start`, of at most `most`, which with `final` end it; else 0.

        encoded: (first position, embeddings) of each image from there on that is to be encoded once the chunk has it.
        """
        left = max(0, min(self._tokens_left, self._context_left - start))
        allowed = min(most, left, self._settings.most_tokens)
        if self.room_s < inf:
            allowed = self._affordable(start, allowed, encoded)
        end = cuts.chunk_end(
            start, start + allowed, start + most, self._settings.grid, final=final, must=not self.chunks
        )
        return end - start

    def _affordable(self, start: int, most: int, encoded: Sequence[tuple[int, int]]) -> int:
        room_s = self.room_s
        tokens = self._within(room_s, start, most)
        for position, embeds in encoded:
            if position >= start + tokens:
                break
            room_s -= self._cost.embed * embeds
            if start + (tokens := self._within(room_s, start, most)) <= position:
                return max(0, position - start)  # up to the image, which there is no time for
        return tokens

    def _within(self, room_s: float, start: int, most: int) -> int:
        """Tokens from `start`, of at most `most`; a share that is due is rounded up to the grid, not down."""
        tokens = self._cost.prefill.largest_q(start, room_s + self._cost.step, most)
        if not self.beyond_target or not tokens:
            return tokens
        return min(most, tokens + 1 + -(start + tokens + 1) % self._settings.grid)

    def add(self, request: str, start: int, tokens: int, embeds: int = 0) -> None:
        """A request's chunk is in the step, with so many embeddings of images for it to be computed."""
        self.chunks[request] = (start, tokens)
        self.room_s -= self._cost.prefill.seconds(tokens, start) - self._cost.step + self._cost.embed * embeds
        self._context_left -= start + tokens
        self._tokens_left -= tokens
