"""How much of a prompt the store holds: what vLLM's OffloadingConnector will load of it, said beforehand."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple, Protocol, overload

from deepinfer_kvstore.descriptor import Descriptor, Group
from deepinfer_kvstore.entry import Entry
from deepinfer_kvstore.keys import Key, make_key

_FIRST_BATCH = 16
"""Keys looked up at once from a window's end; doubled for each further batch."""


class Lookup(Protocol):
    """The part of the index that is needed here."""

    def get_many(self, keys: Sequence[Key]) -> list[Entry | None]:
        """The entry of each key that is there."""

    def longest_prefix(self, keys: Sequence[Key]) -> int:
        """How many leading keys are there."""


class KeyRow(Sequence[Key]):
    """Keys of one group's blocks, made when they are looked at: a search looks at a few of thousands."""

    def __init__(self, schema: int, hashes: Sequence[bytes]) -> None:
        self._schema = schema
        self._hashes = hashes

    def __len__(self) -> int:
        return len(self._hashes)

    @overload
    def __getitem__(self, place: int) -> Key: ...
    @overload
    def __getitem__(self, place: slice) -> "KeyRow": ...
    def __getitem__(self, place: int | slice) -> "Key | KeyRow":
        if isinstance(place, slice):
            return KeyRow(self._schema, self._hashes[place])
        return make_key(self._schema, self._hashes[place])


class Hit(NamedTuple):
    """What an engine would load."""

    tokens: int
    """Leading tokens that need no computing, a multiple of the hash unit. An engine computes the last token of a prompt
    always: where this is the whole prompt, one token is computed all the same."""
    bytes: int
    """Payload of `blocks`."""
    blocks: tuple[KeyRow, ...]
    """By group: of a full group all leading blocks, of a window group those that the window touches."""

    @property
    def keys(self) -> list[Key]:
        """All blocks."""
        return [key for row in self.blocks for key in row]


NO_HIT = Hit(0, 0, ())


def hit_tokens(index: Lookup, descriptor: Descriptor, hashes: Sequence[bytes], tokens: int) -> Hit:
    """What an engine that has nothing cached itself loads of a prompt of `tokens` tokens with block hashes `hashes`.

    The answer is that of `OffloadingConnectorScheduler._lookup_complete_chunks` with no tokens computed and one block a
    chunk: full groups need each block from the start, window groups the blocks under the last `window_tokens`, groups
    with draft layers one block more than is loaded, and a boundary that one group moves is looked at again by the
    window groups. Two differences: full groups are searched on the assumption that whoever collects keeps prefixes
    closed; and where vLLM takes the last token off a prompt that is whole blocks (with window groups), so that it loads
    the blocks and says one token less, the whole prompt is given.

    Engines that replay windows are held to whole blocks by our connector, before windows are looked for.

    Not covered, since it is decided after the connector has answered or without the store: what the engine has cached
    itself, bounded replay (drops hits that are no longer than its window), and blocks gone by the time they are read.
    """
    groups = [_GroupState(group, descriptor.hash_tokens, hashes) for group in descriptor.groups]
    full = [state for state in groups if state.window is None]
    windows = sorted((state for state in groups if state.window is not None), key=lambda state: -(state.window or 0))
    limit = tokens - 1 if windows else tokens
    if windows and descriptor.replays:
        limit -= limit % lcm(*(group.tokens_per_block for group in descriptor.groups))
    hit = _converge(index, full, windows, limit)
    if not hit:
        return NO_HIT
    blocks = tuple(state.loaded(hit) for state in groups)
    size = sum(len(row) * state.group.payload_bytes for row, state in zip(blocks, groups, strict=True))
    whole_prompt = hit == tokens - 1 and tokens % descriptor.hash_tokens == 0
    return Hit(tokens if whole_prompt else hit, size, blocks)


@dataclass
class _GroupState:
    group: Group
    keys: KeyRow
    window: int | None
    """Blocks."""

    def __init__(self, group: Group, hash_tokens: int, hashes: Sequence[bytes]) -> None:
        step = group.tokens_per_block // hash_tokens
        self.group = group
        self.size = group.tokens_per_block
        self.keys = KeyRow(group.schema, hashes[step - 1 :: step])
        self.window = None if group.window_tokens is None else _blocks(group.window_tokens, self.size)

    def loaded(self, tokens: int) -> KeyRow:
        """Keys of the blocks that a hit of `tokens` tokens loads."""
        keys = self.keys[: _blocks(tokens, self.size)]
        return keys if self.window is None else keys[-self.first_window(tokens) :]

    def first_window(self, tokens: int) -> int:
        """Blocks under the window that ends at token `tokens`, which may be inside a block."""
        assert self.group.window_tokens is not None and self.window is not None
        return max(self.window, _blocks(self.group.window_tokens - 1 + -tokens % self.size, self.size))


def _converge(index: Lookup, full: list[_GroupState], windows: list[_GroupState], limit: int) -> int:
    """Tokens that every group can load, at most `limit`."""
    hit = 0
    drafts_done: set[int] = set()
    todo = full + windows
    while todo:
        again: list[_GroupState] = []
        window_seen = False
        for state in todo:
            extra = int(state.group.draft and id(state) not in drafts_done)
            limit = min(limit, len(state.keys) * state.size)
            if limit < state.size:
                return 0
            asked = min(_blocks(limit + extra * state.size, state.size), len(state.keys))
            if state.window is None:
                found = index.longest_prefix(state.keys[:asked])
            else:
                end = min(limit, (asked - extra) * state.size)
                first_window = state.first_window(end) + extra
                found = _last_window(index, state.keys[:asked], first_window, state.window + extra)
            if not found:
                return 0
            if extra:
                drafts_done.add(id(state))
            limit = min(limit, (found - extra) * state.size)
            if limit < state.size:
                return 0
            if limit < hit:
                if not state.group.draft:
                    drafts_done.clear()
                if window_seen:
                    again = windows
            window_seen |= state.window is not None
            hit = limit
        todo = again
    return hit


def _last_window(index: Lookup, keys: Sequence[Key], first_window: int, window: int) -> int:
    """End of the last run of `window` blocks that are there (`first_window` for one that ends with the last key), or
    how many there are from the start."""
    run, needed = 0, first_window
    for number, there in _backwards(index, keys):
        if there:
            run += 1
        else:
            run, needed = 0, window
        if run == needed:
            return number + needed
    return run


def _backwards(index: Lookup, keys: Sequence[Key]) -> Iterator[tuple[int, bool]]:
    end, batch = len(keys), _FIRST_BATCH
    while end:
        start = max(0, end - batch)
        entries = index.get_many(keys[start:end])
        yield from ((number, entries[number - start] is not None) for number in range(end - 1, start - 1, -1))
        end, batch = start, 2 * batch


def _blocks(tokens: int, size: int) -> int:
    return -(-tokens // size)
