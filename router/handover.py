"""How KV gets from a prefill to a decode engine: what each of the two is asked."""

from collections.abc import Mapping
from typing import Any, Protocol

from deepinfer_router.api import Api, Kind
from deepinfer_router.prefill_body import prefill_changes
from deepinfer_router.target import Target

Params = dict[str, Any]
"""`kv_transfer_params` of a request or an answer."""


class Handover(Protocol):
    """One connector's contract. Knows bodies only, no sockets."""

    concurrent: bool
    """Both engines are asked at once; else the decode engine once the prefill has answered."""
    reusable: bool
    """Several decode engines, one after another, can take what one prefill has left."""

    def splits(self, api: Api, fields: Mapping[str, Any]) -> bool:
        """Whether such a request can be split between two engines."""

    def prefill(self, api: Api, fields: Mapping[str, Any], params: Params, transfer: str) -> dict[str, Any]:
        """Changes of the body for the prefill engine. `params`: the router's own; `transfer`: a name of this try."""

    def decode(self, params: Params, answer: Params, transfer: str, prefill: Target) -> Params:
        """`kv_transfer_params` for the decode engine. `answer`: the prefill engine's, empty where it gave none."""

    def pinned(self, answer: Params) -> bool:
        """Whether the prefill engine keeps blocks until a decode engine has come for them."""


class TwoStep:
    """Prefill, then decode with what the prefill answered: NIXL-style connectors of vLLM 0.32, and the shared store.

    The store's prefill engine answers once its blocks can be read, with `kvstore.stored_tokens`, for which the decode
    engine waits; NIXL's answers with its blocks' place, and keeps them until they are fetched. Both can be had at once.
    """

    concurrent = False

    def __init__(self, *, reusable: bool) -> None:
        self.reusable = reusable

    def splits(self, api: Api, fields: Mapping[str, Any]) -> bool:
        """Not where the decode engine needs logits of the prompt, or the prompt is not one."""
        return one_prompt(api, fields) and (self.reusable or one_answer(api, fields))

    def prefill(self, api: Api, fields: Mapping[str, Any], params: Params, transfer: str) -> dict[str, Any]:
        """One token; all that `do_remote_decode` needs, which connectors that do not know it ignore."""
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        place = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        return {**prefill_changes(api, fields), "kv_transfer_params": {**params, **asked, **place}}

    def decode(self, params: Params, answer: Params, transfer: str, prefill: Target) -> Params:
        """The answer's, the router's own beside it."""
        merged = {**params, **answer}
        ours, theirs = params.get("kvstore"), answer.get("kvstore")
        if isinstance(ours, dict) and isinstance(theirs, dict):
            merged["kvstore"] = {**ours, **theirs}
        return merged

    def pinned(self, answer: Params) -> bool:
        """NIXL's are, for 30 s (`kv_lease_duration`) unless the decode engine says that it is coming."""
        return bool(answer.get("do_remote_prefill"))


def one_prompt(api: Api, fields: Mapping[str, Any]) -> bool:
    """Whether it has one prompt, of which the answer tells nothing."""
    sampling = fields.get("sampling_params") if api.in_sampling_params else fields
    sampling = sampling if isinstance(sampling, Mapping) else {}
    if sampling.get("prompt_logprobs") is not None or fields.get("echo") or fields.get("prompt_embeds"):
        return False
    if fields.get("use_beam_search"):
        return False
    prompt = fields.get("prompt") if api.kind is Kind.COMPLETION else None
    return not isinstance(prompt, list) or not prompt or type(prompt[0]) is int


def one_answer(api: Api, fields: Mapping[str, Any]) -> bool:
    """Whether one answer is wanted: blocks that are fetched once are not there for a second."""
    sampling = fields.get("sampling_params") if api.in_sampling_params else fields
    sampling = sampling if isinstance(sampling, Mapping) else {}
    return sampling.get("n") in (None, 1) and sampling.get("best_of") in (None, 1)
