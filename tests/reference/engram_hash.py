"""Engram's table rows: n-grams of a compressed vocabulary, hashed into prime-sized ranges."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers

from reference.config import Config

LARGEST_INT64 = 2**63 - 1
LONE_SPACE = "\ue000"  # a private-use stand-in, so that stripping keeps a token that is one space


def token_map(tokenizer_file: Path) -> list[int]:
    """Compressed id of every token: tokens equal up to case, accents and white space share one."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    fold = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(LONE_SPACE, " "),
        ]
    )
    ids: dict[str, int] = {}
    mapped = []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        is_partial_character = "\ufffd" in text  # nothing to fold in one
        key = tokenizer.id_to_token(token) if is_partial_character else fold.normalize_str(text) or text
        mapped.append(ids.setdefault(key, len(ids)))
    return mapped


def multipliers(config: Config, layer: int) -> list[int]:
    """One odd number per look-back, small enough that id * multiplier stays in int64."""
    bound = max(1, LARGEST_INT64 // config.engram_compressed_vocab_size // 2)
    drawn = np.random.default_rng(10007 * layer).integers(0, bound, config.engram_max_ngram_size, dtype=np.int64)
    return [2 * int(value) + 1 for value in drawn]


def primes(config: Config) -> dict[int, list[list[int]]]:
    """Range sizes [layer][n-gram size - 2][head]: primes from engram_vocab_size up, none used twice."""
    candidate = config.engram_vocab_size - 1
    table: dict[int, list[list[int]]] = {}
    for layer in config.engram_layer_ids:
        table[layer] = []
        for _ in range(config.engram_max_ngram_size - 1):
            sizes: list[int] = []
            while len(sizes) < config.engram_n_heads:
                candidate += 1
                if _is_prime(candidate):
                    sizes.append(candidate)
            table[layer].append(sizes)
    return table


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def hash_ids(input_ids: list[int], mapping: list[int], config: Config) -> dict[int, list[list[int]]]:
    """Table rows [layer][token][(max n-gram - 1) * heads], range offsets included.

    Before the start of the prompt stands the (mapped) pad token; so it does, looking back from a token, for the first
    image token met and everything before that. Without Engram layers: empty.
    """
    if not config.engram_layer_ids:
        return {}
    pad = mapping[config.engram_pad_token_id]
    histories = [[mapping[t] for t in reversed(_live_tail(input_ids[: p + 1], config))] for p in range(len(input_ids))]
    sizes = primes(config)
    out: dict[int, list[list[int]]] = {}
    for layer in config.engram_layer_ids:
        factors = multipliers(config, layer)
        out[layer] = []
        for history in histories:
            padded = history + [pad] * config.engram_max_ngram_size
            row, offset, mixed = [], 0, padded[0] * factors[0]
            for back in range(1, config.engram_max_ngram_size):
                mixed ^= padded[back] * factors[back]
                for prime in sizes[layer][back - 1]:
                    row.append(mixed % prime + offset)
                    offset += prime
            out[layer].append(row)
    return out


def _live_tail(tokens: list[int], config: Config) -> list[int]:
    """The longest end of `tokens`, no longer than an n-gram, in which no token is an image's."""
    tail = tokens[-config.engram_max_ngram_size :]
    dead = [i for i, token in enumerate(tail) if token == config.image_token_id]
    return tail[dead[-1] + 1 :] if dead else tail
