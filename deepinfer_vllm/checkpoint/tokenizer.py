"""A small byte-level BPE tokenizer with V4.1's special tokens, trained on the embedded text."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from deepinfer_vllm.checkpoint.corpus import TEXT
from deepinfer_vllm.checkpoint.special_tokens import BOS, EOS, IMAGE, IMAGE_SPAN_IDS, NAMED, PAD, place_holder
from deepinfer_vllm.models.deepseek_v41.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES = 256
TAIL = (*NAMED, IMAGE, *(place_holder(i) for i in range(IMAGE_SPAN_IDS - 1)))
SMALLEST_VOCABULARY = 3 + BYTES + len(TAIL)

# Up to three digits; a word with the one sign or space before it; punctuation; line ends; other white space.
PIECES = r"\p{N}{1,3}|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@functools.lru_cache(maxsize=16)
def build_tokenizer(vocab_size: int) -> Tokenizer:
    """Ids: bos, eos, pad; the bytes; merges; unused ids where the text gives no more merges; named tokens; image ids.

    The same `vocab_size` gives the same tokenizer. Raises CheckpointError below `SMALLEST_VOCABULARY`.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < SMALLEST_VOCABULARY:
        raise CheckpointError(
            f"vocab_size {vocab_size} is too small: single bytes and special tokens take {SMALLEST_VOCABULARY}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAIL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[BOS, EOS, PAD],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    unused = vocab_size - len(TAIL) - tokenizer.get_vocab_size()
    filler = [place_holder(IMAGE_SPAN_IDS - 1 + i) for i in range(unused)]
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in (*filler, *TAIL)])
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Id of a token that is known to exist."""
    number = tokenizer.token_to_id(token)
    assert number is not None, token
    return int(number)


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """`tokenizer_config.json`. No chat template: V4.1 prompts are encoded by vLLM's `deepseek_v41` tokenizer mode."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
