"""vLLM's own block hashes of the prompts on stdin, for a process whose PYTHONHASHSEED is another.

Reads and writes one JSON list. A request: block, tokens, generated, salt, lora, mm, embeds (rows of floats), seed
(PYTHONHASHSEED or null).
"""

import json
import os
import sys
from typing import Any

import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request


def block_hashes(case: dict[str, Any]) -> list[str]:
    if case["seed"] is None:
        os.environ.pop("PYTHONHASHSEED", None)
    else:
        os.environ["PYTHONHASHSEED"] = case["seed"]
    kv_cache_utils.init_none_hash(sha256_cbor)
    embeds = case["embeds"]
    request = Request(
        "request",
        case["tokens"] if embeds is None else None,
        SamplingParams(max_tokens=100_000),
        None,
        prompt_embeds=None if embeds is None else torch.tensor(embeds, dtype=torch.float32),
        mm_features=[
            MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset=offset, length=length))
            for identifier, offset, length in case["mm"]
        ],
        lora_request=case["lora"] and LoRARequest(case["lora"][0], 1, case["lora"][1]),
        cache_salt=case["salt"],
        block_hasher=kv_cache_utils.get_request_block_hasher(case["block"], sha256_cbor),
    )
    for token in case["generated"]:
        request.append_output_token_ids(token)
    return [block_hash.hex() for block_hash in request.block_hashes]


if __name__ == "__main__":
    cases = json.load(sys.stdin)
    print(json.dumps([block_hashes(case) for case in cases]))
