"""Tool definitions are checked before they become prompt: a template would render nonsense without a word."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from deskrl.tokens.renderers.base import RendererError


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Check OpenAI function definitions as far as prompts and parsers rely on them.

    Raises:
        RendererError: names the turn (0, the prompt), the tool's place and name, and what is wrong with it.
    """
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        problem = _problem(function, name)
        if not problem and name in seen:
            problem = "the name occurs twice"
        if problem:
            raise RendererError(f"turn 0: tool {index + 1} of {len(tools)} ({name!r}): {problem}")
        seen.add(str(name))


def _problem(function: Any, name: Any) -> str:
    if not isinstance(function, Mapping):
        return 'expected {"type": "function", "function": {"name": ..., "parameters": {...}}}'
    if not isinstance(name, str) or not name:
        return "function.name must be a non-empty string"
    parameters = function.get("parameters", {})
    if not isinstance(parameters, Mapping):
        return f"parameters must be a JSON schema of an object, not {type(parameters).__name__}"
    if parameters.get("type", "object") != "object":
        return f"parameters must describe an object, not {parameters['type']!r}"
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, Mapping) or not all(isinstance(v, Mapping | bool) for v in properties.values()):
        return "parameters.properties must map each argument to its schema"
    if not isinstance(required, list | tuple) or not all(isinstance(entry, str) for entry in required):
        return "parameters.required must be a list of names"
    try:
        json.dumps(function, allow_nan=False)
    except (TypeError, ValueError) as error:
        return f"is not JSON: {error}"
    return ""
