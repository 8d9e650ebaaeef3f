"""The hash chain against vLLM's, and its two ways against each other."""

import functools
import hashlib
import itertools
import json
import os
import random
import struct
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_kvstore import chain as module
from deepinfer_kvstore.chain import Chain, ChainHasher, HashRow, none_hash
from deepinfer_kvstore.extra_keys import ExtraKeys, Lora, MultiModal

ROOT = none_hash("0")
EDGES = [0, 1, 22, 23, 24, 25, 254, 255, 256, 257, 65534, 65535, 65536, 65537, 2**32 - 2, 2**32 - 1]
"""Around the lengths that CBOR has for numbers."""
EMBEDDING_WIDTH = 4


def random_case(rng: random.Random, block: int, salt: bool, lora: bool, mm: bool, embeds: bool) -> dict[str, Any]:
    length = rng.choice([0, block - 1, block, 3 * block, rng.randrange(12 * block)])
    items = []
    overlap = rng.random() < 0.3  # sound inside a video
    for number in range(rng.randrange(1, 6) if mm else 0):
        first = items[-1][1] + (0 if overlap else items[-1][2]) if items else 0
        items.append((f"image-{number}", first + rng.randrange(2 * block), rng.randrange(1, 3 * block)))
    return {
        "block": block,
        "tokens": [rng.choice([rng.randrange(2**17), rng.choice(EDGES)]) for _ in range(length)],
        "generated": [rng.randrange(2**17) for _ in range(rng.randrange(2 * block))],
        "salt": f"sält-{rng.random()}" if salt else rng.choice([None, ""]),
        "lora": ("adapter", f"/adapters/{rng.randrange(9)}") if lora else None,
        "mm": items,
        "embeds": [[rng.random() for _ in range(EMBEDDING_WIDTH)] for _ in range(length)]
        if embeds and length
        else None,
        "seed": rng.choice([None, "0", "4242"]),
    }


def embedding_digests(rows: list[list[float]], block: int) -> list[bytes]:
    packed = b"".join(struct.pack(f"<{EMBEDDING_WIDTH}f", *row) for row in rows)
    step = 4 * EMBEDDING_WIDTH * block
    return [hashlib.sha256(packed[at : at + step]).digest() for at in range(0, len(packed), step)]


def our_hashes(case: dict[str, Any], compiled: bool) -> list[str]:
    """Tokens of the prompt, then the generated ones one by one, as an engine appends them."""
    seed = module.DEFAULT_SEED if case["seed"] is None else case["seed"]
    extra = ExtraKeys(
        case["salt"],
        case["lora"] and Lora(*case["lora"]),
        [MultiModal(*item) for item in case["mm"]],
        None if case["embeds"] is None else embedding_digests(case["embeds"], case["block"]),
    )
    chain = Chain(ChainHasher(case["block"], none_hash(seed), compiled=compiled), extra)
    chain.extend(case["tokens"] if case["embeds"] is None else [0] * len(case["tokens"]))
    for token in case["generated"]:
        chain.extend([token])
    assert chain.tokens == len(case["tokens"]) + len(case["generated"])
    return [block_hash.hex() for block_hash in chain.hashes()]


@pytest.mark.vllm
def test_equal_to_vllm_in_a_process_with_another_seed() -> None:
    """# LMCache#1139, LMCache#2136: two processes of different PYTHONHASHSEED named equal blocks differently."""
    rng = random.Random(0)
    cases = [
        random_case(rng, block, *what)
        for block in (16, 32, 64, 128)
        for what in itertools.product([False, True], repeat=4)
        for _ in range(4)
    ]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("vllm_block_hashes.py"))],
        input=json.dumps(cases),
        env={**os.environ, "PYTHONHASHSEED": "98765"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert sum(map(len, theirs)) > 500
    for case, expected in zip(cases, theirs, strict=True):
        for compiled in (True, False):
            assert our_hashes(case, compiled) == expected, case


def test_root_is_that_of_a_default_engine_or_of_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert none_hash().hex() == "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert none_hash() == none_hash("7") == hashlib.sha256(cbor2.dumps("7")).digest() != none_hash("")


@pytest.mark.parametrize("root", [b"", b"\0", ROOT[:-1], ROOT + b"\0"])
def test_a_root_of_another_length_is_refused(root: bytes) -> None:
    """A meta.json that somebody made up must not let compiled code write beyond its memory."""
    with pytest.raises(ValueError, match=f"root has {len(root)} bytes, a chain needs 32"):
        ChainHasher(16, root)


def test_compiled_code_runs_here() -> None:
    assert module._compiled() is not None


@pytest.mark.parametrize("obstacle", ["switched off", "no compiler", "no room"])
def test_without_compiled_code_python_does_it(obstacle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_compiled", functools.cache(module._compiled.__wrapped__))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if obstacle == "switched off":
        monkeypatch.setenv("DEEPINFER_VLLM_NATIVE", "0")
    elif obstacle == "no compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CC", raising=False)
    else:
        (tmp_path / "deepinfer_kvstore").write_text("")
    said: list[str] = []
    monkeypatch.setattr(module.logger, "info", lambda text, *args: said.append(text % args))
    hashers = [ChainHasher(4, ROOT) for _ in range(2)]
    assert all(hasher._append is module._append_python for hasher in hashers)
    assert hashers[0].hashes(range(40)) == ChainHasher(4, ROOT, compiled=False).hashes(range(40))
    assert len(said) == (obstacle != "switched off")


sequences = st.lists(st.one_of(st.integers(0, 2**32 - 1), st.sampled_from(EDGES)), max_size=300)
extras = st.builds(
    ExtraKeys,
    salt=st.none() | st.text(max_size=40),
    lora=st.none() | st.builds(Lora, st.text(max_size=300), st.text(max_size=80)),
    mm=st.lists(st.builds(MultiModal, st.text(max_size=70), st.integers(0, 300), st.integers(0, 200)), max_size=5).map(
        lambda items: sorted(items, key=lambda item: item.offset)
    ),
    embeds=st.none() | st.lists(st.binary(min_size=32, max_size=32), max_size=5),
)


@given(sequences, extras, st.sampled_from([1, 2, 5, 16, 23, 24, 64, 256, 300]))
def test_compiled_equals_python(tokens: list[int], extra: ExtraKeys, block: int) -> None:
    compiled, plain = ChainHasher(block, ROOT), ChainHasher(block, ROOT, compiled=False)
    expected = plain.hashes(tokens, extra)
    assert compiled.hashes(tokens, extra) == expected
    assert len(expected) == len(tokens) // block


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("size", [1, 3, 7, 64, 70_000])
def test_both_forms_of_the_compiled_code(portable: bool, size: int) -> None:
    rng = random.Random(size)
    tokens = [rng.choice([rng.randrange(2**32), *EDGES]) for _ in range(2 * size)]
    append = module._compiled(portable)
    assert append is not None
    found, expected = bytearray(ROOT), bytearray(ROOT)
    append(found, array("I", tokens), 0, 2, size, (("cache_salt", "s" * 100),))
    module._append_python(expected, array("I", tokens), 0, 2, size, (("cache_salt", "s" * 100),))
    assert found == expected


@given(sequences, st.lists(st.integers(0, 300), max_size=4), st.booleans())
def test_a_chain_grows_to_what_it_is_at_once(tokens: list[int], cuts: list[int], compiled: bool) -> None:
    hasher = ChainHasher(16, ROOT, compiled=compiled)
    extra = ExtraKeys("salt", Lora("a", "/a"), [MultiModal("image", 20, 30), MultiModal("image", 60, 100)])
    chain = Chain(hasher, extra)
    for first, last in itertools.pairwise([0, *sorted(cuts), 300]):
        chain.extend(tokens[first:last])
        chain = chain if chain.tokens % 16 else Chain(hasher, extra, bytearray(chain.packed))
    assert chain.hashes() == hasher.hashes(tokens, extra)


def test_forms_of_tokens() -> None:
    hasher = ChainHasher(2, ROOT)
    tokens = [7, 300, 70_000, 2**32 - 1]
    expected = hasher.hashes(tokens)
    little = struct.pack("<4I", *tokens)
    same = [tuple(tokens), array("I", tokens), array("q", tokens), little, bytearray(little), memoryview(little)]
    for form in [*same, memoryview(array("I", tokens)), memoryview(array("Q", tokens))]:
        assert hasher.hashes(form) == expected


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], ["1"], [None], b"12345", memoryview(b"123")])
def test_tokens_that_are_none(tokens: Any) -> None:
    chain = Chain(ChainHasher(1, ROOT))
    chain.extend([5])
    with pytest.raises(ValueError, match="token ids are whole numbers of 0 to 4294967295"):
        chain.extend(tokens)
    assert chain.tokens == 1 and chain.hashes() == ChainHasher(1, ROOT).hashes([5])


def test_each_part_of_the_key_changes_the_hash() -> None:
    """# lmdeploy#4930, vllm hf3fs connector: equal keys across tenants, adapters and images."""
    hasher = ChainHasher(4, ROOT)
    image = MultiModal("cat", 1, 2)
    firsts = [
        hasher.hashes([1, 2, 3, 4], extra)[0]
        for extra in (
            ExtraKeys(),
            ExtraKeys("a"),
            ExtraKeys("b"),
            ExtraKeys(lora=Lora("a", "/a")),
            ExtraKeys(lora=Lora("a", "/b")),
            ExtraKeys(mm=[image]),
            ExtraKeys(mm=[image._replace(offset=2)]),
            ExtraKeys(mm=[image._replace(identifier="dog")]),
            ExtraKeys(embeds=[b"1" * 32]),
        )
    ]
    assert len(set(firsts)) == len(firsts)


def test_a_row_of_hashes_is_a_sequence_of_them() -> None:
    hashes = [bytes([number]) * 32 for number in range(9)]
    row = HashRow(b"".join(hashes))
    assert list(row) == hashes and len(row) == 9 and row[-1] == hashes[-1]
    assert list(row[1::2]) == hashes[1::2] and list(row[1::2][-2:]) == hashes[1::2][-2:] and row[1::2][1] == hashes[3]
    assert list(row[7:20]) == hashes[7:] and list(HashRow(b"")) == []
    with pytest.raises(IndexError):
        row[9]
