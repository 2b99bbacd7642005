"""Qwen3-Coder, Qwen3.5 and Qwen3.6 tool calls, arguments in XML:

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A value is everything between its tags, less one newline at each end. It is not escaped, so one that holds any of the
family's tags cannot be told from a broken call: it is malformed, never cut short. Values are typed by the tool's
schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from deskrl.tokens.parsing.blocks import OPEN, parse_blocks, skip_space
from deskrl.tokens.parsing.outcome import Malformed, ParsedTurn, ToolCall
from deskrl.tokens.parsing.schema import ArgumentTypes, JsonSchema, TypeMismatch

FUNCTION = "<function="
FUNCTION_CLOSE = "</function>"
PARAMETER = "<parameter="
PARAMETER_CLOSE = "</parameter>"
_INNER = (FUNCTION, FUNCTION_CLOSE, PARAMETER, PARAMETER_CLOSE)
_NOT_IN_NAMES = frozenset('<>="\n\r')

_STOPS = ("<|im_end|>", "<|endoftext|>")


@dataclass(frozen=True)
class QwenXmlParser:
    """Reads Qwen XML turns; `prefilled_thought`: the prompt ends in an open `<think>`."""

    prefilled_thought: bool = False

    def parse(self, text: str, tools: Mapping[str, JsonSchema], truncated: bool = False) -> ParsedTurn:
        """Reads one turn; `truncated`: the token cap ended it."""
        return parse_blocks(
            text,
            partial(_read_call, tools=tools),
            prefilled=self.prefilled_thought,
            truncated=truncated,
            inner_tags=_INNER,
            stops=_STOPS,
        )


def _read_call(text: str, start: int, end: int, tools: Mapping[str, JsonSchema]) -> ToolCall | Malformed:
    start = skip_space(text, start, end)
    if not text.startswith(FUNCTION, start, end):
        return Malformed("shape", start, f"expected {FUNCTION}NAME> after {OPEN}")
    name, position = _name(text, start + len(FUNCTION), end)
    if not name:
        return Malformed("name", start, f"{FUNCTION} without a usable name and >")
    types = ArgumentTypes(tools.get(name))
    arguments: dict[str, Any] = {}
    while True:
        position = skip_space(text, position, end)
        if text.startswith(FUNCTION_CLOSE, position, end):
            after = skip_space(text, position + len(FUNCTION_CLOSE), end)
            if after < end:
                return Malformed("shape", after, f"text between {FUNCTION_CLOSE} and the call's end")
            return ToolCall(name, arguments)
        if not text.startswith(PARAMETER, position, end):
            kind = "unterminated" if position == end else "shape"
            return Malformed(kind, position, f"expected {PARAMETER}KEY> or {FUNCTION_CLOSE}")
        read = _read_parameter(text, position, end, types, arguments)
        if isinstance(read, Malformed):
            return read
        position = read


def _read_parameter(
    text: str, start: int, end: int, types: ArgumentTypes, arguments: dict[str, Any]
) -> int | Malformed:
    """Adds one argument; the offset after it."""
    key, body = _name(text, start + len(PARAMETER), end)
    if not key:
        return Malformed("name", start, f"{PARAMETER} without a usable name and >")
    close = text.find(PARAMETER_CLOSE, body, end)
    if close < 0:
        return Malformed("unterminated", start, f"{PARAMETER}{key}> without {PARAMETER_CLOSE}")
    for tag in (PARAMETER, FUNCTION, FUNCTION_CLOSE):
        if (at := text.find(tag, body, close)) >= 0:
            return Malformed("tag_in_value", at, f"{tag} in the value of {key!r}, or {PARAMETER_CLOSE} left out before")
    if key in arguments:
        return Malformed("duplicate", start, f"argument {key!r} is given twice")
    value = text[body:close].removeprefix("\n").removesuffix("\n")
    try:
        arguments[key] = types.value(key, value)
    except TypeMismatch as error:
        return Malformed("type", body, str(error))
    return close + len(PARAMETER_CLOSE)


def _name(text: str, start: int, end: int) -> tuple[str, int]:
    """The name up to `>` and the offset after that; an empty name if there is no usable one."""
    close = text.find(">", start, end)
    name = text[start:close] if close >= 0 else ""
    usable = bool(name) and name == name.strip() and _NOT_IN_NAMES.isdisjoint(name)
    return (name if usable else ""), close + 1
