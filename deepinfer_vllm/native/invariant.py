"""The model's operations in C that gives each row the same result whatever rows there are beside it (`invariant.c`).

Arrays of any floating dtype come in; float32 is computed, and comes out where nothing else is said. On a CPU only,
where `library` is not None. Widths alone fix the order of operations: threads, tiles and vector units change no bit.
"""

import ctypes
import functools
from pathlib import Path

import torch

from deepinfer_vllm.native import build

_P, _N, _F = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
FLAGS = (*build.FLAGS, "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi")
ARGUMENTS: dict[str, list[type]] = {
    "linear": [_P, _P, _P, _N, _N, _N, _N],
    "dots": [_P, _P, _P, _N, _N],
    "normalise": [_P, _P, _N, _N, _F],
    "attention": [_P, *[_P, _N, _P, _N] * 2, _N, _P, _F, _P, _N, _N, _N],
    "head_scores": [*[_P] * 5, *[_N] * 4],
    "sigmoid": [_P, _P, _N],
    "sqrt_softplus": [_P, _P, _N],
    "softmax": [_P, _P, _N, _N],
    "swiglu": [_P, _N, _P, _N, _P, _N, _N, _F],
    "pool": [_P, _P, _N, _N, _N],
    "hyper_gates": [*[_P] * 7, _N, _N, _F, _F, _F],
    "collapse": [_P, _P, _P, _N, _N, _N],
    "expand": [*[_P] * 5, _N, _N, _N],
    "rotary": [*[_P] * 4, _N, _N],
    "rotate": [*[_P] * 4, *[_N] * 4, _F],
    "engram_gates": [*[_P] * 4, _N, _F, _F, _F],
}
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

Rows = tuple[torch.Tensor, torch.Tensor]
"""Cached rows [slots, D], and for each token the slots of those it reads [T, n] int64, negative for none."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled code, the same for the life of the process; None as `build.kernels` has it."""
    return build.load(Path(__file__).with_name("invariant.c"), FLAGS, ARGUMENTS)


def _call(name: str, *arguments: "torch.Tensor | float") -> None:
    found = library()
    assert found is not None, "asked for without compiled code"
    getattr(found, name)(*(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments))


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x.float().contiguous()


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., inputs] times weight [outputs, inputs] transposed: [..., outputs] in x's dtype."""
    outputs, inputs = weight.shape
    if x.shape[-1] != inputs:
        raise ValueError(f"rows of {x.shape[-1]} with a weight of {list(weight.shape)}: widths must agree")
    rows, weight = _plain(x), weight.contiguous()
    out = torch.empty(*x.shape[:-1], outputs)
    count = rows.numel() // inputs
    _call("linear", rows, weight, out, count, outputs, inputs, _KINDS[weight.dtype])
    return out.to(x.dtype)


def dots(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Sums [...] of products along the last dimension of a and b [..., n]."""
    a, b = _plain(a), _plain(b)
    out = torch.empty(a.shape[:-1])
    _call("dots", a, b, out, out.numel(), a.shape[-1])
    return out


def normalise(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., n] / sqrt(mean(x^2) + eps)."""
    x = _plain(x)
    out = torch.empty_like(x)
    _call("normalise", x, out, x.shape[:-1].numel(), x.shape[-1], eps)
    return out


def attention(
    query: torch.Tensor, window: Rows, selected: Rows | None, sink: torch.Tensor, scale: float
) -> torch.Tensor:
    """`gather_attention.gather_attention` over cached rows in place, the window's before the selected: query [T, H, D]
    to [T, H, D]."""
    query = _plain(query)
    tokens, heads, dim = query.shape
    out = torch.empty_like(query)
    kept = [_in_place(*rows) for rows in ((window,) if selected is None else (window, selected))]
    places = [part for rows, slots in kept for part in (rows, rows.stride(0) * rows.itemsize, slots, slots.shape[1])]
    if selected is None:
        places += [0, 0, 0, 0]
    kind = _KINDS[window[0].dtype]
    _call("attention", query, *places, kind, _plain(sink), scale, out, tokens, heads, dim)
    return out


def _in_place(rows: torch.Tensor, slots: torch.Tensor) -> Rows:
    return rows if rows.stride(1) == 1 else rows.contiguous(), slots.contiguous()


def head_scores(query: torch.Tensor, weight: torch.Tensor, keys: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """sum over h of weight[t, h] * relu(query[t, h] . keys[owner[t], g]).

    query [T, H, D], weight [T, H], keys [B, G, D], owner [T] int64 to [T, G].
    """
    query, weight, keys, owner = _plain(query), _plain(weight), _plain(keys), owner.contiguous()
    tokens, heads, dim = query.shape
    out = torch.empty(tokens, keys.shape[1])
    _call("head_scores", query, weight, keys, owner, out, tokens, heads, keys.shape[1], dim)
    return out


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), of any shape."""
    return _each("sigmoid", x)


def sqrt_softplus(x: torch.Tensor) -> torch.Tensor:
    """sqrt(log(1 + exp(x))), of any shape."""
    return _each("sqrt_softplus", x)


def _each(name: str, x: torch.Tensor) -> torch.Tensor:
    x = _plain(x)
    out = torch.empty_like(x)
    _call(name, x, out, x.numel())
    return out


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Along the last dimension."""
    x = _plain(x)
    out = torch.empty_like(x)
    _call("softmax", x, out, x.shape[:-1].numel(), x.shape[-1])
    return out


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(gate) * up of [n, inner], both clamped by `limit` where it is positive."""
    gate, up = (part.float() for part in (gate, up))
    gate, up = (part if part.stride(-1) == 1 else part.contiguous() for part in (gate, up))
    out = torch.empty(gate.shape)
    _call("swiglu", gate, gate.stride(0), up, up.stride(0), out, *gate.shape, limit)
    return out


def pool(members: torch.Tensor) -> torch.Tensor:
    """members [n, ratio, 2 * D], values then scores, to means [n, D] weighted by the softmax of the scores."""
    members = _plain(members)
    groups, ratio, width = members.shape
    out = torch.empty(groups, width // 2)
    _call("pool", members, out, groups, ratio, width // 2)
    return out


def hyper_gates(
    flat: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, m: int, eps: float, norm_eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`mhc.HyperConnection` up to the logits of `comb`.

    flat [T, M * D] to (pre [T, M], post [T, M], comb [T, M, M]).
    """
    flat, tokens = _plain(flat), len(flat)
    mixes, squares = linear(flat, fn), dots(flat, flat)
    pre, post, comb = torch.empty(tokens, m), torch.empty(tokens, m), torch.empty(tokens, m, m)
    _call("hyper_gates", mixes, squares, base, scale, pre, post, comb, tokens, m, flat.shape[1], eps, norm_eps)
    return pre, post, comb


def collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """`mhc.collapse`, float32."""
    streams = _plain(streams)
    tokens, m, dim = streams.shape
    out = torch.empty(tokens, dim)
    _call("collapse", streams, pre.contiguous(), out, tokens, m, dim)
    return out


def expand(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """`mhc.expand`, float32."""
    y, streams, post, comb = _plain(y), _plain(streams), post.contiguous(), comb.contiguous()
    out = torch.empty_like(streams)
    _call("expand", y, streams, post, comb, out, *streams.shape)
    return out


def rotary(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin as `rope.RotaryTable` has them."""
    positions, frequencies = positions.long().contiguous(), _plain(frequencies)
    tokens, pairs = len(positions), len(frequencies)
    cos, sin = torch.empty(tokens, 2 * pairs), torch.empty(tokens, 2 * pairs)
    _call("rotary", positions, frequencies, cos, sin, tokens, pairs)
    return cos, sin


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """`rope.rotate`, in x's dtype."""
    wide = _plain(x)
    out = torch.empty_like(wide)
    heads = 1 if x.dim() == 2 else x.shape[1]
    _call("rotate", wide, cos, sin, out, len(x), heads, x.shape[-1], cos.shape[-1], -1.0 if inverse else 1.0)
    return out.to(x.dtype)


def engram_gates(x: torch.Tensor, weight: torch.Tensor, key: torch.Tensor, eps: float, least: float) -> torch.Tensor:
    """The gates [T, M] of `engram.Engram` from streams, weight and keys [T, M, hidden]."""
    x, key = _plain(x), _plain(key)
    weighted, squares, key_squares = dots(x * weight, key), dots(x, x), dots(key, key)
    out = torch.empty_like(weighted)
    _call("engram_gates", weighted, squares, key_squares, out, out.numel(), x.shape[-1], eps, least)
    return out
