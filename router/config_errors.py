"""One line of a pydantic error: which setting, its value, what is allowed, what it is for."""

import re
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

_SECRET = frozenset(("key", "keys", "sha256", "token", "secret", "password", "headers", "salt"))
"""Words of names whose values may be secrets, also where somebody has put one by mistake."""


def one_line(error: ValidationError, model: type[BaseModel]) -> str:
    """The first error, and how many more there are."""
    first, *more = error.errors(include_url=False)
    more = [other for other in more if other["loc"] != first["loc"][: len(other["loc"])]]  # a consequence of the first
    rest = f" ({len(more)} more after this)" if more else ""
    return " ".join((_describe(first, model) + rest).split())


def _describe(error: ErrorDetails, model: type[BaseModel]) -> str:
    loc = list(error["loc"])
    path = ".".join(map(str, loc))
    if error["type"] == "extra_forbidden":
        holder = _at(model, loc[:-1])
        names = list(holder.model_fields) if holder else []
        near = get_close_matches(str(loc[-1]), names, n=1, cutoff=0.5)
        return f"{path}: there is no such setting: " + (f"did you mean {near[0]!r}?" if near else _one_of(names))
    if error["type"] == "missing":
        return f"{path}: missing{_purpose(model, loc)}"
    message = error["msg"].removeprefix("Value error, ").replace("Input should", "should")
    if not path:
        return message
    return f"{path}: {_shown(path, error['input'])}: {message}{_purpose(model, loc)}"


def _one_of(names: list[str]) -> str:
    return f"there are {', '.join(names)}" if names else "remove it"


def _shown(path: str, value: Any) -> str:
    if not _SECRET.isdisjoint(re.split(r"[._]", path.lower())):
        return "its value"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _purpose(model: type[BaseModel], loc: list[int | str]) -> str:
    for end in range(len(loc), 0, -1):  # the end may be an index, or the name of a union's member
        holder = _at(model, loc[: end - 1])
        field = holder.model_fields.get(str(loc[end - 1])) if holder else None
        if field:
            return f" ({field.description.rstrip('.')})" if field.description else ""
    return ""


def _at(model: type[BaseModel], loc: list[int | str]) -> type[BaseModel] | None:
    """The section that `loc` names."""
    here: type[BaseModel] | None = model
    for part in loc:
        if here is None:
            return None
        if isinstance(part, str) and part in here.model_fields:
            here = section(here.model_fields[part].annotation)
    return here


def section(annotation: Any) -> type[BaseModel] | None:
    """The model in a field's annotation, also where it is optional or in a list or table."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := section(part))), None)
