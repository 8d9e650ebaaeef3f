"""One forward step as the layers see it: which token belongs to which request, and where its rows lie."""

import functools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from deepinfer_vllm.models.deepseek_v41.config import VisionConfig
from deepinfer_vllm.models.deepseek_v41.rope import RotaryTable

if TYPE_CHECKING:
    from deepinfer_vllm.models.deepseek_v41.backend import PagedRowsMetadata
    from deepinfer_vllm.models.deepseek_v41.cache import PagedCache


@dataclass
class Step:
    """A batch of T tokens from R requests, each request's tokens adjacent and in order."""

    positions: torch.Tensor
    """[T] int64."""
    request: torch.Tensor
    """[T] int64: the request of each token."""
    spans: list[tuple[int, int]]
    """Per request, the half-open range of its tokens."""
    seq_lens: list[int]
    """Per request, tokens it will have once this step is done."""
    tables: dict[str, torch.Tensor]
    """Block table of each cache, by its name."""
    is_image: torch.Tensor | None = None
    """[T] bool: whether a token is a place of an image. None: there are none."""
    routed_as_image: torch.Tensor | None = None
    """[T] bool: the same as the router sees it, by its range of ids."""
    cached: torch.Tensor | None = None
    """[T] bool: computed again after a prefix hit, with rows in shared blocks that must stay. None: there are none."""
    window_floor: torch.Tensor | None = None
    """[R] int64: the first position with a window row, in the layers that skip rows. None: nothing is skipped."""
    selected: torch.Tensor | None = None
    """[T, K] int64: compressed rows chosen by the latest index source, ascending, then -1."""
    candidates: torch.Tensor | None = None
    """[T, P] int64: candidate blocks of the candidate source, -1 padded; a row of only -1 admits every block."""
    dp_tokens: list[int] | None = None
    """T of every data-parallel rank, where there are several."""
    engram_rows: dict[int, torch.Tensor] = field(default_factory=dict)
    """Table rows to read, [T, columns] int64, by engram layer."""
    is_block: bool = False
    """Whether each request's tokens are one draft block: all see each other and the window before the first."""
    _rotary: dict[bool, RotaryTable] = field(default_factory=dict, init=False, repr=False)
    _windows: dict[tuple[int, int, int, bool], tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict, init=False, repr=False
    )

    @classmethod
    def from_metadata(
        cls,
        metadata: "dict[str, PagedRowsMetadata]",
        positions: torch.Tensor,
        *,
        is_block: bool = False,
        dp_tokens: list[int] | None = None,
    ) -> "Step":
        """Build from vLLM's metadata by cache name; tokens that only pad the batch are left out."""
        any_group = next(iter(metadata.values()))
        bounds = any_group.query_start.tolist()
        lengths = any_group.query_start.diff()
        request = torch.repeat_interleave(torch.arange(len(lengths)), lengths.long()).to(positions.device)
        return cls(
            positions=positions[: bounds[-1]].long(),
            request=request,
            spans=list(zip(bounds[:-1], bounds[1:], strict=True)),
            seq_lens=any_group.seq_lens.tolist(),
            tables={name: m.block_table for name, m in metadata.items()},
            is_block=is_block,
            dp_tokens=dp_tokens,
        )

    def mark_images(self, ids: torch.Tensor, vision: VisionConfig) -> None:
        """Tell image tokens by their ids [T]."""
        first = vision.image_token_id
        self.is_image = ids == first
        self.routed_as_image = (ids >= first) & (ids < first + vision.ROUTED_IDS)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.positions)

    def read(self, cache: "PagedCache", row: torch.Tensor, width: int | None = None) -> torch.Tensor:
        """Rows [T, k] of each token's own request: [T, k, width]."""
        return cache.read(self.tables[cache.name], self.request.unsqueeze(-1), row, width)

    def write(self, cache: "PagedCache", values: torch.Tensor) -> None:
        """One row a token, at its position; what a prefix hit found in a cache that keeps prefixes stays."""
        request, positions = self.request, self.positions
        if self.cached is not None and cache.spec.prefix_cacheable:
            new = ~self.cached
            request, positions, values = request[new], positions[new], values[new]
        cache.write(self.tables[cache.name], request, positions, values)

    def rotary(self, frequencies: torch.Tensor, *, compressed: bool) -> RotaryTable:
        """The table of this step's positions; layers of a kind, `compressed` or not, have the same frequencies."""
        if compressed not in self._rotary:
            self._rotary[compressed] = RotaryTable(self.positions, frequencies)
        return self._rotary[compressed]

    @functools.cached_property
    def first_positions(self) -> list[int]:
        """Per request, the position of its first token; exact, where `seq_lens` may be an upper bound. What a request
        without tokens has says nothing."""
        if not self.num_tokens:
            return [0] * len(self.spans)
        starts = torch.tensor([start for start, _ in self.spans]).clamp_max(self.num_tokens - 1)
        positions: list[int] = self.positions[starts.to(self.positions.device)].tolist()
        return positions

    def window_width(self, window: int) -> int:
        """How many window rows a token of this step can see at most."""
        reach = min(window, max(self.seq_lens))
        return reach + max(end - start for start, end in self.spans) if self.is_block else reach

    def window_rows(self, window: int, part: slice, *, floored: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions [t, W] of the window rows of tokens `part`, and which of them count; another's is the token's own.

        A token sees the `window` rows that end with its own; in a draft block, those before the block and the block.
        `floored`: from `window_floor` on. Layers of a kind share the answer for the latest part.
        """
        asked = (window, part.start, part.stop, floored)
        if asked not in self._windows:
            index, valid = self._reach(window, part)
            if floored and self.window_floor is not None:
                valid = valid & (index >= self.window_floor[self.request[part]].unsqueeze(-1))
            self._windows.clear()
            self._windows[asked] = torch.where(valid, index, self.positions[part].unsqueeze(-1)), valid
        return self._windows[asked]

    def _reach(self, window: int, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        offsets = torch.arange(self.window_width(window), device=self.positions.device)
        if not self.is_block:
            index = self.positions[part].unsqueeze(-1) - offsets.flip(0)
            return index, index >= 0
        start, end = torch.tensor(self.spans, device=offsets.device)[self.request[part]].unsqueeze(1).unbind(-1)
        index = self.positions[start] - min(window, max(self.seq_lens)) + offsets
        return index, (index >= 0) & (index <= self.positions[end - 1])

    def take(self, rows: torch.Tensor, spans: list[tuple[int, int]], window_floor: torch.Tensor) -> "Step":
        """The same step narrowed to some of its tokens: rows [T'] int64 ascending, with their new spans.

        `dp_tokens` stays: the other ranks decide about theirs."""
        return replace(
            self,
            positions=self.positions[rows],
            request=self.request[rows],
            spans=spans,
            is_image=None if self.is_image is None else self.is_image[rows],
            routed_as_image=None if self.routed_as_image is None else self.routed_as_image[rows],
            cached=None if self.cached is None else self.cached[rows],
            window_floor=window_floor,
            selected=None if self.selected is None else self.selected[rows],
            candidates=None if self.candidates is None else self.candidates[rows],
            engram_rows={layer: ids[rows] for layer, ids in self.engram_rows.items()},
        )
