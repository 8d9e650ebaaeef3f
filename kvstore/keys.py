"""Names of stored blocks: schema id, then the block's hash in vLLM's chain.

A schema id says what a block holds (which layers, in which record format). It takes the place of vLLM's group index,
which moves with engine options and would let two kinds of bytes answer to one name.
"""

HASH_BYTES = 32
KEY_BYTES = 2 + HASH_BYTES

Key = bytes
"""`schema.to_bytes(2, "big") + block_hash`: 34 bytes. Keys of one schema are neighbours in the index."""


def make_key(schema: int, block_hash: bytes) -> Key:
    """The key of the block `block_hash` (32 bytes) of schema `schema` (0 to 65535).

    Raises:
        ValueError: a hash of another length, as a non-default hash algorithm of vLLM gives.
    """
    if len(block_hash) != HASH_BYTES:
        raise ValueError(f"block hash has {len(block_hash)} bytes, keys need {HASH_BYTES}: use the hash sha256_cbor")
    return schema.to_bytes(2, "big") + block_hash


def schema_of(key: Key) -> int:
    """The schema id of a key."""
    return int.from_bytes(key[:2], "big")
