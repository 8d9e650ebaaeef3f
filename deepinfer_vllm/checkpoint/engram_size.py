"""The two sizes of Engram that a config must state: compressed vocabulary and rows of each table."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONE_SPACE = "\ue000"  # stands in for a token that is one space while white space is stripped


def compressed_vocab_size(tokenizer: Tokenizer) -> int:
    """Number of classes when tokens that differ only in case, accents or white space fall together.

    A token that is only a part of a character has no text to fold and is a class by its raw form.
    """
    from tokenizers import Regex, normalizers

    folding = normalizers.Sequence(
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
    classes = set()
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        partial = "\ufffd" in text
        classes.add(tokenizer.id_to_token(token) if partial else folding.normalize_str(text) or text)
    return len(classes)


def table_rows(layers: int, vocab_size: int, max_ngram_size: int, heads: int) -> list[int]:
    """Rows of each layer's table: the sum of its primes.

    Every (layer, n-gram size, head) owns a range whose size is the next prime from `vocab_size` up that no other has.
    """
    candidate = vocab_size
    rows = []
    for _ in range(layers):
        total = 0
        for _ in range((max_ngram_size - 1) * heads):
            while not _is_prime(candidate):
                candidate += 1
            total += candidate
            candidate += 1
        rows.append(total)
    return rows


def _is_prime(n: int) -> bool:
    divisor = 2
    while divisor * divisor <= n:
        if n % divisor == 0:
            return False
        divisor += 1
    return n > 1
