"""Which Engram table rows a token reads: exact hashes of the n-grams that end at it.

Tokens are first mapped to a smaller vocabulary in which spellings of one word fall together. The hash of an n-gram is
the exclusive or of its tokens' ids times odd multipliers, one per look-back distance; each (n, head) pair takes it
modulo a prime of its own and owns the table rows from its offset on.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from deepinfer_vllm.models.deepseek_v41.config import ConfigError, EngramConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEAD = -1
"""A compressed id that no n-gram may span."""


@dataclass(frozen=True)
class HashLayout:
    """Hash constants of one Engram layer; columns run over n = 2, 3, ... and within n over the heads."""

    multipliers: torch.Tensor
    """[max_ngram] int64, by look-back distance."""
    primes: torch.Tensor
    """[max_ngram - 1, heads] int64."""
    offsets: torch.Tensor
    """[columns] int64: the first row of each column."""


def hash_layouts(engram: EngramConfig) -> list[HashLayout]:
    """The constants of every Engram layer, in the order of `layer_ids`. Raises ConfigError when a table's rows differ
    from what the hash addresses."""
    layouts = []
    bound = max(1, (2**63 - 1) // engram.compressed_vocab_size // 2)
    primes_by_layer = table_primes(len(engram.layer_ids), engram.vocab_size, engram.max_ngram, engram.num_heads)
    for layer_id, num_rows, primes in zip(engram.layer_ids, engram.num_rows, primes_by_layer, strict=True):
        if num_rows != sum(map(sum, primes)):
            limit = f"the hash of layer {layer_id} addresses {sum(map(sum, primes))} rows"
            remedy = "Correct it, or engram_vocab_size, engram_n_heads and engram_max_ngram_size it follows from"
            raise ConfigError("engram_num_embeddings", num_rows, limit, remedy)
        multipliers = np.random.default_rng(10007 * layer_id).integers(0, bound, engram.max_ngram) * 2 + 1
        sizes = torch.tensor(primes)
        offsets = sizes.flatten().cumsum(0) - sizes.flatten()
        layouts.append(HashLayout(torch.tensor(multipliers.tolist()), sizes, offsets))  # all on the default device
    return layouts


def table_primes(num_layers: int, vocab_size: int, max_ngram: int, num_heads: int) -> list[list[list[int]]]:
    """By layer, n-gram size and head: the primes from `vocab_size` up, in order and none used twice.

    A table has as many rows as the sum of its layer's primes.
    """
    primes = _primes_from(vocab_size)
    return [[[next(primes) for _ in range(num_heads)] for _ in range(max_ngram - 1)] for _ in range(num_layers)]


def _primes_from(candidate: int) -> Iterator[int]:
    while True:
        if candidate >= 2 and all(candidate % d for d in range(2, math.isqrt(candidate) + 1)):
            yield candidate
        candidate += 1


def compressed_vocabulary(tokenizer: "Tokenizer", vocab_size: int) -> tuple[torch.Tensor, int]:
    """([vocab_size] int64 compressed id of every token, number of classes), classes numbered as first seen.

    Tokens that differ only in case, accents or white space fall together; one that is part of a character is a class by
    its raw form. Ids beyond the tokenizer's have no text; they share class 0 and are never produced by text.
    """
    from tokenizers import Regex, normalizers

    lone_space = "\ue000"  # private use: a token that is one space must not be stripped to nothing
    normalise = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), lone_space),
            normalizers.Strip(),
            normalizers.Replace(lone_space, " "),
        ]
    ).normalize_str
    classes: dict[str, int] = {}
    ids = []
    for token in range(min(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = str(tokenizer.id_to_token(token)) if "\ufffd" in text else normalise(text) or text
        ids.append(classes.setdefault(key, len(classes)))
    ids += [0] * (vocab_size - len(ids))
    return torch.tensor(ids), len(classes)


def ngram_rows(history: torch.Tensor, positions: torch.Tensor, pad: int, layout: HashLayout) -> torch.Tensor:
    """Table rows [T, columns] int64 that tokens read.

    history [T, max_ngram] int64: compressed ids by look-back distance, the token itself first; entries before the
    request's start may hold anything. Look-back ends at the start and at a DEAD id; from there on it reads `pad`.
    """
    distance = torch.arange(history.shape[-1], device=history.device)
    ended = ((distance > positions.unsqueeze(-1)) | (history == DEAD)).long().cumsum(-1) > 0
    products = torch.where(ended, pad, history) * layout.multipliers
    mixed = products[:, 0]
    columns = []
    for n in range(1, history.shape[-1]):
        mixed = mixed ^ products[:, n]
        columns.append(mixed.unsqueeze(-1) % layout.primes[n - 1])
    return torch.cat(columns, dim=-1) + layout.offsets
