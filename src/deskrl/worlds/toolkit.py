"""Tools as typed Python functions: their JSON schema, argument checking and errors.

Model: a tool is a function returning text. Its parameters become one flat JSON schema (no `request`
envelope), read from the signature: the types `str`, `int`, `float`, `bool`, `list[...]`, `dict[...]`,
each optionally `| None`, and `Annotated[type, "description"]` for the description.

Invariants
- A wrong argument never reaches the function: it raises `ToolError`, whose text tells the model which
  argument is wrong and what is accepted.
- Models often send containers and numbers as JSON strings (`"[1, 2]"`, `"3"`); those are converted.
- No pydantic and no MCP SDK here: importing either costs more than the rest of the start-up.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

_JSON_TYPES: dict[type, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}


class ToolError(Exception):
    """A tool call that failed for a reason the model can act on; the text is shown to the model."""


@dataclass(frozen=True)
class Parameter:
    """One argument of a tool. `default` is only meaningful when `required` is False."""

    name: str
    kind: type
    item: Any
    nullable: bool
    required: bool
    default: Any
    description: str

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of this argument."""
        schema: dict[str, Any] = {"type": _JSON_TYPES[self.kind]}
        if self.kind is list:
            schema["items"] = _item_schema(self.item)
        if self.description:
            schema["description"] = self.description
        if not self.required and self.default is not None:
            schema["default"] = self.default
        return schema


@dataclass(frozen=True)
class Tool:
    """A callable tool: its public name (`{server}_{tool}`), description, arguments and function."""

    name: str
    description: str
    parameters: tuple[Parameter, ...]
    function: Callable[..., str]

    def definition(self) -> dict[str, Any]:
        """Return the tool as MCP's `tools/list` states it."""
        return {
            "name": self.name,
            "description": self.description,
            "inputSchema": {
                "type": "object",
                "properties": {p.name: p.schema() for p in self.parameters},
                "required": [p.name for p in self.parameters if p.required],
            },
        }

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Check `arguments` and run the function. Raises `ToolError` for anything the model did wrong."""
        known = {p.name for p in self.parameters}
        unknown = sorted(set(arguments) - known)
        if unknown:
            accepted = ", ".join(p.name for p in self.parameters) or "none"
            raise ToolError(f"{self.name}: unknown argument {unknown[0]!r}; accepted: {accepted}")
        values: dict[str, Any] = {}
        for parameter in self.parameters:
            if parameter.name not in arguments:
                if parameter.required:
                    raise ToolError(f"{self.name}: argument {parameter.name!r} is required")
                values[parameter.name] = parameter.default
            else:
                values[parameter.name] = _coerce(self.name, parameter, arguments[parameter.name])
        return self.function(**values)


def tool_from(server: str, function: Callable[..., str]) -> Tool:
    """Describe `function` (a plain function or a bound method) as a tool of `server`.

    The first paragraph of the docstring is the description. Raises `TypeError` for a parameter type
    outside the supported set: a programming error, found at start-up.
    """
    hints = get_type_hints(function, include_extras=True)
    parameters = tuple(
        _parameter(name, hints[name], parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
    )
    description = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
    return Tool(f"{server}_{function.__name__}", description, parameters, function)


def _parameter(name: str, hint: Any, default: Any) -> Parameter:
    description = ""
    if get_origin(hint) is Annotated:
        hint, description = get_args(hint)[:2]
    nullable = False
    if get_origin(hint) in (Union, types.UnionType):
        options = [option for option in get_args(hint) if option is not type(None)]
        nullable = len(options) < len(get_args(hint))
        if len(options) != 1:
            raise TypeError(f"parameter {name}: only `T | None` unions are supported, got {hint}")
        hint = options[0]
    kind = get_origin(hint) or hint
    if kind not in _JSON_TYPES:
        raise TypeError(f"parameter {name}: unsupported type {hint}")
    item = get_args(hint)[0] if kind is list and get_args(hint) else Any
    required = default is inspect.Parameter.empty
    return Parameter(name, kind, item, nullable, required, None if required else default, description)


def _item_schema(item: Any) -> dict[str, Any]:
    kind = get_origin(item) or item
    if kind not in _JSON_TYPES:
        return {}
    schema: dict[str, Any] = {"type": _JSON_TYPES[kind]}
    if kind is list:
        schema["items"] = _item_schema(get_args(item)[0] if get_args(item) else Any)
    return schema


def _coerce(tool: str, parameter: Parameter, value: Any) -> Any:
    """Return `value` as the parameter's type, converting what models commonly get wrong."""
    kind: Any = parameter.kind
    if value is None:
        if parameter.nullable:
            return None
        if not parameter.required:
            return parameter.default
    if isinstance(value, str) and kind is not str:
        with contextlib.suppress(ValueError):
            value = json.loads(value.strip().lower() if kind is bool else value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ToolError(
            f"{tool}: argument {parameter.name!r} must be of type {_JSON_TYPES[kind]}, "
            f"got {json.dumps(value, default=str)[:80]}"
        )
    if isinstance(value, list):
        for index, entry in enumerate(value):
            expected = get_origin(parameter.item) or parameter.item
            if expected in _JSON_TYPES and not isinstance(entry, expected):
                raise ToolError(f"{tool}: argument {parameter.name!r}[{index}] must be of type {_JSON_TYPES[expected]}")
    return value
