"""The compiled half of DSpark's decisions (`drafts.c`), for `spec_decode.decision`, which has their Python twin."""

import ctypes
import functools
import logging
from pathlib import Path

from deepinfer_kvstore import native
from deepinfer_vllm.native.build import build

_P, _N, _D = ctypes.c_void_p, ctypes.c_long, ctypes.c_double
SOURCE = Path(__file__).with_name("drafts.c")
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-ffp-contract=off")

logger = logging.getLogger("vllm.deepinfer")  # vLLM shows its own loggers only


@functools.cache
def library() -> ctypes.CDLL | None:
    """The same for the life of the process; None, logged once, where it is switched off or cannot be built. Loads no
    torch: decisions are replayed without it."""
    if not native.allowed():
        return None
    try:
        found = ctypes.CDLL(str(build(native.cache_directory("deepinfer_vllm"), native.compiler(), SOURCE, FLAGS)))
    except native.ERRORS as error:
        logger.info("Drafts are decided about without compiled code: %s", error)
        return None
    found.survivals.argtypes, found.survivals.restype = [*[_P] * 5, *[_N] * 3], None
    found.decide.argtypes, found.decide.restype = [*[_P] * 6, *[_N] * 3, *[_D] * 3, *[_N] * 2], _N
    return found
