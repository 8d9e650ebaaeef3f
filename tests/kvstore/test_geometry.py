"""Sizes of slots, against those of V4.1's packed blocks."""

import pytest

from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.geometry import HEADER_BYTES, PAGE_BYTES, Geometry
from deepinfer_kvstore.tenants import tenant_tag


@pytest.mark.parametrize(
    ("payload", "slot", "chunk"),
    [
        (116_928, 118_784, 1 << 17),
        (117_216, 118_784, 1 << 17),
        (191_664, 192_512, 1 << 18),
        (212_256, 212_992, 1 << 18),
    ],
)
def test_the_header_takes_no_page_of_its_own_at_the_sizes_of_v41(payload: int, slot: int, chunk: int) -> None:
    assert Geometry.of(payload, 1 << 30) == Geometry(slot, (1 << 30) // slot)
    assert Geometry.of(payload, 1 << 30, power_of_two=True) == Geometry(chunk, (1 << 30) // chunk)


@pytest.mark.parametrize("payload", [1, PAGE_BYTES - HEADER_BYTES, PAGE_BYTES - HEADER_BYTES + 1, 65 << 20])
def test_a_slot_holds_payload_and_header(payload: int) -> None:
    slot = Geometry.of(payload, 1 << 30).slot_bytes
    assert slot % PAGE_BYTES == 0 and payload + HEADER_BYTES <= slot < payload + HEADER_BYTES + PAGE_BYTES


def test_slabs_of_more_than_64_gib_are_counted_exactly() -> None:
    """# vllm#52656"""
    geometry = Geometry.of(212_256, 65 << 30)
    assert geometry.slab_bytes == 327_680 * 212_992 == 69_793_218_560


@pytest.mark.parametrize("payload", [0, -1, (1 << 30) + 1])
def test_blocks_of_impossible_sizes_are_refused(payload: int) -> None:
    """# sglang#34969"""
    with pytest.raises(StoreConfigError, match="it must have 1 to"):
        Geometry.of(payload, 1 << 30)


def test_a_slab_smaller_than_a_slot_is_refused() -> None:
    with pytest.raises(StoreConfigError, match="slab_bytes is 4096, one slot takes 8192: raise slab_bytes"):
        Geometry.of(4096, 4096)


def test_tags_of_tenants() -> None:
    assert tenant_tag("") == 0
    assert tenant_tag("a") == 0xCA978112  # the first bytes of its SHA-256
