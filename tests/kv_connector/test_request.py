"""What a request may ask for, and the order of its blocks."""

from typing import Any

import pytest
from vllm.v1.kv_offload.base import ReqContext, make_offload_key

from deepinfer_vllm.kv_connector.request import Prefix, Wishes

CLASSES = {"agent": 1, "chat": 2, "none": None}


@pytest.mark.parametrize(
    ("params", "wishes"),
    [
        (None, Wishes()),
        ({}, Wishes()),
        ({"remote_host": "x"}, Wishes()),
        ({"kvstore": None}, Wishes()),
        ({"kvstore": {}}, Wishes()),
        ({"kvstore": {"ttl_class": "chat", "tenant": "t", "ticket": "abc"}}, Wishes("chat", "t", "abc")),
        ({"kvstore": {"ttl_class": "none"}}, Wishes("none")),
        # garbage is counted, and costs nothing else
        ({"kvstore": "chat"}, Wishes(ignored=1)),
        ({"kvstore": ["chat"]}, Wishes(ignored=1)),
        ({"kvstore": {"ttl_class": "forever", "tenant": "t"}}, Wishes(None, "t", ignored=1)),
        ({"kvstore": {"ttl_class": ["chat"], "tenant": 7, "ticket": {}}}, Wishes(ignored=3)),
        ({"kvstore": {"tenant": "t" * 129, "ticket": "t" * 4097}}, Wishes(ignored=2)),
        ({"kvstore": {"colour": "blue", 5: 6}}, Wishes(ignored=2)),
        ("kvstore", Wishes()),
    ],
)
def test_wishes(params: Any, wishes: Wishes) -> None:
    assert Wishes.read(params, CLASSES) == wishes


def test_a_prefix_grows_with_its_request() -> None:
    request = ReqContext("r")
    keys = [make_offload_key(bytes([n]) * 32, group) for group in (0, 3) for n in range(4)]
    for number, key in enumerate(keys[:6]):
        request.set_offload_key_position(key, 32 * (number % 4 + 1))
    prefix = Prefix.of(request)
    assert prefix.keys == {0: keys[:4], 3: keys[4:6]}
    assert prefix.parent(keys[0]) is None and prefix.parent(keys[3]) == keys[2] and prefix.parent(keys[4]) is None
    for key in keys[6:]:
        request.set_offload_key_position(key, 96)
    assert Prefix.of(request) is prefix
    assert prefix.keys == {0: keys[:4], 3: keys[4:]} and prefix.parent(keys[7]) == keys[6]
