"""The tool catalogue: what the model sees of the world's tools, and how its calls go back.

World servers may wrap all arguments of a tool in one envelope parameter (`request` or `input`). The model
sees the flat form, which costs far fewer prompt tokens; the envelope is put back on dispatch. Arguments
that a model wrote as JSON strings where the schema wants a container are parsed on the way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

ENVELOPES = ("request", "input")


@dataclass(frozen=True)
class Tool:
    """One tool: the schema of its arguments as the model sees it, and the envelope to put back."""

    name: str
    description: str
    parameters: dict[str, Any]
    envelope: str | None = None

    def definition(self) -> dict[str, Any]:
        """The tool as an OpenAI function schema."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def dispatch_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the server wants them."""
        properties = self.parameters.get("properties", {})
        if self.envelope is not None and set(arguments) == {self.envelope} and self.envelope not in properties:
            # The model wrote the envelope itself.
            inner = _container(arguments[self.envelope], {"type": "object"}, {})
            arguments = inner if isinstance(inner, dict) else arguments
        fixed = {name: _container(v, properties.get(name, {}), self.parameters) for name, v in arguments.items()}
        return {self.envelope: fixed} if self.envelope is not None else fixed


def make_tool(name: str, description: str, schema: Mapping[str, Any]) -> Tool:
    """A catalogue entry from an MCP tool's name, description and input schema."""
    properties = schema.get("properties", {})
    if len(properties) == 1:
        (parameter,) = properties
        inner = _resolve(properties[parameter], schema)
        if parameter in ENVELOPES and inner.get("type") == "object" and "properties" in inner:
            flat = {
                "type": "object",
                "properties": inner["properties"],
                "required": inner.get("required", []),
            }
            if "$defs" in schema:
                flat["$defs"] = schema["$defs"]
            return Tool(name, description, flat, parameter)
    return Tool(name, description, dict(schema))


def compact(tool: Tool) -> dict[str, Any]:
    """The definition without what a model does not need (titles, long descriptions): fewer prompt tokens."""
    definition = tool.definition()
    function = definition["function"]
    function["description"] = function["description"].strip().split("\n", 1)[0]
    function["parameters"] = _without_titles(function["parameters"])
    return definition


def essential(tool: Tool) -> Tool:
    """The tool with its required arguments only: less to read for a small model with a small context."""
    required = set(tool.parameters.get("required", []))
    kept = {name: value for name, value in tool.parameters.get("properties", {}).items() if name in required}
    return replace(tool, parameters={**tool.parameters, "properties": kept})


def server_of(name: str, servers: Sequence[str]) -> str | None:
    """The server a tool `{server}_{tool}` belongs to, None if to none of them."""
    return next((s for s in sorted(servers, key=len, reverse=True) if name.startswith(s + "_")), None)


def _resolve(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(schema, Mapping):
        return {}  # a boolean schema: anything goes
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/$defs/"):
        return dict(root.get("$defs", {}).get(reference.removeprefix("#/$defs/"), {}))
    return schema


def _container(value: Any, schema: Any, root: Mapping[str, Any]) -> Any:
    if not isinstance(value, str):
        return value
    resolved = _resolve(schema, root)
    kinds: set[Any] = set()
    for option in (resolved, *(_resolve(option, root) for option in resolved.get("anyOf", []))):
        kind = option.get("type")
        kinds.update(kind if isinstance(kind, list) else [kind])
    if kinds & {"object", "array"} and "string" not in kinds:
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            return value
        return parsed if isinstance(parsed, dict | list) else value
    return value


def _without_titles(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_titles(v) for k, v in value.items() if not (k == "title" and isinstance(v, str))}
    if isinstance(value, list):
        return [_without_titles(v) for v in value]
    return value
