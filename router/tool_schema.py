"""Tools in the body as the prompt has them.

Recipe closes the parameters of strict tools (every property required, no others) before it writes them into the prompt.
An engine that constrains calls to the schema in the body has to be given the same one.
"""

from typing import Any

from deepinfer_router.api import Kind


def with_strict_parameters(kind: Kind, tools: Any, strict: dict[str, Any]) -> list[Any] | None:
    """`tools` of a body with the parameters of strict ones replaced by those of `strict`, by name; None: no change."""
    if not strict or not isinstance(tools, list):
        return None
    changed = [_with_parameters(kind, tool, strict) for tool in tools]
    return changed if changed != tools else None


def _with_parameters(kind: Kind, tool: Any, strict: dict[str, Any]) -> Any:
    if not isinstance(tool, dict):
        return tool
    if kind is Kind.CHAT and isinstance(function := tool.get("function"), dict) and function.get("name") in strict:
        return {**tool, "function": {**function, "parameters": strict[function["name"]]}}
    if kind is not Kind.CHAT and tool.get("name") in strict:
        return {**tool, "input_schema" if kind is Kind.MESSAGES else "parameters": strict[tool["name"]]}
    return tool
