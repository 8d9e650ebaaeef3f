"""The descriptor of a namespace: everything that decides which bytes a block hash stands for.

Two engines share blocks only when every field is equal. Its digest is in each slot's header, so that bytes of another
model, revision, dtype or layout can never be taken for ours.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any

import cbor2

from deepinfer_kvstore.errors import StoreConfigError

FORMAT_VERSION = 1
"""Version of slabs, headers and journals. An older or newer store is another namespace, never misread."""


@dataclass(frozen=True)
class Group:
    """One kind of block that a prefix needs."""

    schema: int
    """Schema id, u16: see `keys`."""
    tokens_per_block: int
    """Tokens that one stored block covers; a multiple of the namespace's hash unit."""
    payload_bytes: int
    """Bytes of one stored block."""
    window_tokens: int | None = None
    """None: every block of a prefix is needed. Else: only those that the last `window_tokens` tokens of it touch."""
    draft: bool = False
    """It holds draft layers that vLLM drops the last block of (`is_eagle_group`): a hit needs one block more."""


@dataclass(frozen=True)
class Descriptor:
    """What a namespace holds. Strings are compared, never parsed."""

    model: str
    weights: str
    """Revision or digest of the weights."""
    kv_dtype: str
    record_format: str
    """Names of the record formats, in a fixed order."""
    layout: str
    """Digest of the names, shapes and order of what a block holds."""
    hash_algorithm: str
    none_hash: str
    """Hex of the chain's root: vLLM derives it from PYTHONHASHSEED."""
    hash_tokens: int
    """Tokens per hash of the chain."""
    shards: str
    """How the bytes of several ranks lie in one block."""
    groups: tuple[Group, ...]
    replays: bool = False
    """Engines compute the last window of a hit again, so with window groups a hit ends where a block does, and before
    the prompt's last token."""
    format_version: int = FORMAT_VERSION

    def digest(self) -> bytes:
        """SHA-256 over all fields, 32 bytes."""
        return hashlib.sha256(cbor2.dumps(asdict(self), canonical=True)).digest()

    @property
    def directory(self) -> str:
        """Name of the namespace's directory below the root: 16 hex digits of the digest."""
        return self.digest().hex()[:16]

    @property
    def payload_bytes(self) -> int:
        """The largest block: slots are made for it."""
        return max(group.payload_bytes for group in self.groups)

    def to_json(self) -> str:
        """Text of `meta.json`."""
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str) -> "Descriptor":
        """Read `meta.json`; `source` names it in errors.

        Raises:
            StoreConfigError: not a descriptor, or one of another format version.
        """
        try:
            found: dict[str, Any] = json.loads(text)
            version = found.get("format_version")
            if version != FORMAT_VERSION:
                raise StoreConfigError(
                    f"{source}: store format {version!r}, this version reads {FORMAT_VERSION}:"
                    " remove its directory or change root"
                )
            if unknown := found.keys() ^ {field.name for field in fields(cls)}:
                raise StoreConfigError(
                    f"{source}: fields {sorted(unknown)} are missing or unknown: not a store's meta.json"
                )
            read = cls(**{**found, "groups": tuple(Group(**group) for group in found["groups"])})
            _check_types(read, *read.groups)
            return read
        except (json.JSONDecodeError, TypeError, AttributeError, RecursionError) as error:
            raise StoreConfigError(
                f"{source}: not a store's meta.json ({error}): remove it or use another root"
            ) from error


def _check_types(*parts: Descriptor | Group) -> None:
    """Raises TypeError: a field is no text, number or truth value where it must be one."""
    for part in parts:
        for field in fields(part):
            value = getattr(part, field.name)
            if field.type in (str, int, bool) and type(value) is not field.type:
                raise TypeError(f"{field.name} is {value!r:.40}")
