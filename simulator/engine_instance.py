"""The smallest JSON value that a JSON Schema allows: the mock engine's structured answers and tool calls."""

from typing import Any

_MOST_DEPTH = 16


def instance(schema: Any, definitions: Any = None, depth: int = 0) -> Any:
    """A value that fits; `definitions`: the schema's root, for references. Raises ValueError for one too deep."""
    if not isinstance(schema, dict):
        return {}
    if depth > _MOST_DEPTH:
        raise ValueError(f"schema nests deeper than {_MOST_DEPTH}")
    root = schema if definitions is None else definitions
    if "$ref" in schema:
        found: Any = root
        for name in str(schema["$ref"]).lstrip("#/").split("/"):
            found = found[name]
        return instance(found, root, depth + 1)
    for name in ("const", "default"):
        if name in schema:
            return schema[name]
    if "enum" in schema:
        return schema["enum"][0]
    for name in ("anyOf", "oneOf", "allOf"):
        if schema.get(name):
            return instance(schema[name][0], root, depth + 1)
    kind = schema.get("type", "object")
    match kind[0] if isinstance(kind, list) else kind:
        case "object":
            fields = schema.get("properties", {})
            wanted = schema.get("required") or fields
            return {name: instance(fields.get(name, {}), root, depth + 1) for name in wanted}
        case "array":
            return [instance(schema.get("items", {}), root, depth + 1)] * max(1, schema.get("minItems", 1))
        case "string":
            return "a" * max(1, schema.get("minLength", 1))
        case "integer" | "number":
            return schema.get("minimum", 0)
        case "boolean":
            return True
    return None
