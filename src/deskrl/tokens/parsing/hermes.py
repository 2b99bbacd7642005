"""Hermes tool calls: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen2.5, Qwen3).

The JSON carries its own types, so the tools' schemas are not consulted: whether a value suits the tool is for the
tool to answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deskrl.tokens.parsing.blocks import parse_blocks
from deskrl.tokens.parsing.jsonvalue import load_arguments, load_json
from deskrl.tokens.parsing.outcome import Malformed, ParsedTurn, ToolCall
from deskrl.tokens.parsing.schema import JsonSchema

_STOPS = ("<|im_end|>", "<|endoftext|>")


@dataclass(frozen=True)
class HermesParser:
    """Reads Hermes turns; `prefilled_thought`: the prompt ends in an open `<think>`."""

    prefilled_thought: bool = False

    def parse(self, text: str, tools: Mapping[str, JsonSchema], truncated: bool = False) -> ParsedTurn:
        """Reads one turn; `truncated`: the token cap ended it."""
        return parse_blocks(text, _read_call, prefilled=self.prefilled_thought, truncated=truncated, stops=_STOPS)


def _read_call(text: str, start: int, end: int) -> ToolCall | Malformed:
    try:
        value = load_json(text[start:end])
    except ValueError as error:
        return Malformed("json", start, f"not a JSON object: {error}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return Malformed("shape", start, 'expected {"name": "...", "arguments": {...}}')
    misnamed = [key for key, each in value.items() if isinstance(each, dict) and key != "arguments"]
    if "arguments" not in value and misnamed:
        # Run without them, the call would do something else than the model wrote.
        return Malformed("shape", start, f"the arguments must stand under 'arguments', got {misnamed[0][:40]!r}")
    try:
        return ToolCall(value["name"], load_arguments(value.get("arguments")))
    except TypeError as error:
        return Malformed("shape", start, str(error))
    except ValueError as error:
        return Malformed("json", start, f"arguments are not JSON: {error}")
