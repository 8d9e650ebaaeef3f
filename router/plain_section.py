"""What `section` is in a worker: the same names, without checks.

A configuration that was checked elsewhere arrives pickled, and is then an object of the same class with the same
values. What a section's defaults are is known too.
"""

import sys
from collections.abc import Callable
from typing import Any, Self


class _Missing:
    """Of a field without a default."""


_MISSING = _Missing()


class BaseModel:
    """A section: fields are attributes, and defaults are the class's."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    @classmethod
    def model_validate(cls, values: dict[str, Any]) -> Self:
        """`values` were checked."""
        return cls(**values)

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """As pydantic pickles: what is set, and some of its own books."""
        self.__dict__.update(state["__dict__"])


def Field(default: Any = _MISSING, *, default_factory: Callable[[], Any] | None = None, **_: Any) -> Any:  # noqa: N802
    """The default."""
    return default_factory() if default_factory else default


def ConfigDict(**_: Any) -> dict[str, Any]:  # noqa: N802
    """Nothing."""
    return {}


class SecretStr:
    """A type alone: workers are told no secret of the admin port's."""


def field_validator(*_: Any, **__: Any) -> Callable[[Any], Any]:
    """Leaves the function alone: nobody calls it."""
    return lambda function: function


model_validator = field_validator


def instead_of_pydantic() -> None:
    """From now on sections in this process are plain. Call it before any is loaded."""
    name = "deepinfer_router.section"
    assert name not in sys.modules, "sections are loaded already"
    sys.modules[name] = sys.modules[__name__]
