"""What an engine is there for."""

from enum import StrEnum


class Role(StrEnum):
    """An engine has one or more; one that does a whole request alone has PREFILL and DECODE."""

    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"
