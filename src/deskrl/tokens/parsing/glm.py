"""GLM-4.5, 4.6 and 4.7 tool calls: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>`.

GLM-4.5 writes a newline between the pieces, 4.7 none; white space there means nothing. A string value is everything
between its tags, unescaped and unstripped: one that holds any of the family's tags cannot be told from a broken call
and is malformed. Values are typed by the tool's schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from deskrl.tokens.parsing.blocks import OPEN, parse_blocks, skip_space
from deskrl.tokens.parsing.outcome import Malformed, ParsedTurn, ToolCall
from deskrl.tokens.parsing.schema import ArgumentTypes, JsonSchema, TypeMismatch

KEY = "<arg_key>"
KEY_CLOSE = "</arg_key>"
VALUE = "<arg_value>"
VALUE_CLOSE = "</arg_value>"
_INNER = (KEY, KEY_CLOSE, VALUE, VALUE_CLOSE)

_STOPS = ("<|observation|>", "<|user|>", "<|endoftext|>")


@dataclass(frozen=True)
class GlmParser:
    """Reads GLM turns; `prefilled_thought`: the prompt ends in an open `<think>`."""

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
    first = text.find(KEY, start, end)
    position = end if first < 0 else first
    name = text[start:position].strip()
    if not name or "<" in name or ">" in name or any(character.isspace() for character in name):
        return Malformed("name", start, f"expected a tool's name after {OPEN}")
    types = ArgumentTypes(tools.get(name))
    arguments: dict[str, Any] = {}
    while (position := skip_space(text, position, end)) < end:
        read = _read_pair(text, position, end, types, arguments)
        if isinstance(read, Malformed):
            return read
        position = read
    return ToolCall(name, arguments)


def _read_pair(text: str, start: int, end: int, types: ArgumentTypes, arguments: dict[str, Any]) -> int | Malformed:
    """Adds one argument; the offset after it."""
    found = _element(text, start, end, KEY, KEY_CLOSE)
    if isinstance(found, Malformed):
        return found
    key, position = text[found[0] : found[1]].strip(), found[1] + len(KEY_CLOSE)
    if not key:
        return Malformed("name", start, f"{KEY} without a name")
    if key in arguments:
        return Malformed("duplicate", start, f"argument {key!r} is given twice")
    found = _element(text, skip_space(text, position, end), end, VALUE, VALUE_CLOSE)
    if isinstance(found, Malformed):
        return found
    try:
        arguments[key] = types.value(key, text[found[0] : found[1]])
    except TypeMismatch as error:
        return Malformed("type", found[0], str(error))
    return found[1] + len(VALUE_CLOSE)


def _element(text: str, start: int, end: int, opening: str, closing: str) -> tuple[int, int] | Malformed:
    """The bounds of the text in one element that must start here."""
    if not text.startswith(opening, start, end):
        return Malformed("unterminated" if start >= end else "shape", start, f"expected {opening}")
    body = start + len(opening)
    close = text.find(closing, body, end)
    if close < 0:
        return Malformed("unterminated", start, f"{opening} without {closing}")
    for tag in _INNER:
        if (at := text.find(tag, body, close)) >= 0:
            return Malformed("tag_in_value", at, f"{tag} inside {opening}...{closing}")
    return body, close
