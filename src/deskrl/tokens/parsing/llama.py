"""Llama-3 tool calls: `{"name": ..., "parameters": {...}}`, several separated by `;`, after an optional
`<|python_tag|>`. Decode with special tokens kept, or the tag is lost.

There are no tags around a call, so JSON decides. An object with a tool's name and parameters is a call wherever it
stands; any other JSON is an answer that happens to hold braces, unless the tag announced calls, a call came before
it, or it starts like a call (`{"name": ...`): then it is a call gone wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deskrl.tokens.parsing.blocks import cut_opening
from deskrl.tokens.parsing.jsonvalue import load_arguments, load_json_at
from deskrl.tokens.parsing.outcome import Malformed, ParsedTurn, Problem, ToolCall, Truncated, turn
from deskrl.tokens.parsing.reasoning import split_reasoning, unclosed_thought
from deskrl.tokens.parsing.schema import JsonSchema
from deskrl.tokens.parsing.stops import end_of_turn

PYTHON_TAG = "<|python_tag|>"
_LIKE_A_CALL = re.compile(r'\{\s*"(?:name|parameters|arguments)"\s*:|\{\s*"type"\s*:\s*"function"')
_CALL_OPENINGS = ('{"name":', '{"parameters":', '{"arguments":', '{"type":"function"')
_STOPS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")


@dataclass(frozen=True)
class LlamaParser:
    """Reads Llama-3 turns; `prefilled_thought`: the prompt ends in an open `<think>`."""

    prefilled_thought: bool = False

    def parse(self, text: str, tools: Mapping[str, JsonSchema], truncated: bool = False) -> ParsedTurn:
        """Reads one turn; `truncated`: the token cap ended it."""
        text = text[: end_of_turn(text, _STOPS)]
        split = split_reasoning(text, prefilled=self.prefilled_thought)
        if split.unclosed is not None:
            return turn([], [], unclosed_thought(text, split.unclosed, (PYTHON_TAG,), truncated), split.reasoning)
        content: list[str] = []
        calls: list[ToolCall] = []
        problem = _scan(text, split.rest, truncated, content, calls)
        return turn(content, calls, problem, split.reasoning)


def _scan(text: str, position: int, truncated: bool, content: list[str], calls: list[ToolCall]) -> Problem | None:
    tag = text.find(PYTHON_TAG, position)
    announced = False
    while (brace := text.find("{", position)) >= 0:
        if 0 <= tag < position:
            tag = text.find(PYTHON_TAG, position)
        announced = announced or 0 <= tag < brace
        read, end = _read_object(text, brace, truncated, announced or bool(calls))
        if read is None:
            if tag < brace:
                break
            # Braces of ordinary text; the calls come after the tag.
            content.append(text[position:tag])
            position = tag
            continue
        if not isinstance(read, ToolCall):
            return read
        calls.append(read)
        content.append(_between(text[position:brace]))
        position = end
    rest = text[position:]
    content.append(_between(rest) if calls else rest)
    lone = text.find(PYTHON_TAG, position)
    if lone >= 0 and truncated:
        return Truncated(lone, f"the token cap cut the turn after {PYTHON_TAG}")
    if lone >= 0:
        return Malformed("shape", lone, f"{PYTHON_TAG} without a call")
    return cut_opening(text, position, (PYTHON_TAG,)) if truncated else None


def _read_object(
    text: str, brace: int, truncated: bool, expected: bool
) -> tuple[ToolCall | Malformed | Truncated | None, int]:
    """What starts at a brace (None: ordinary text), and the offset after it."""
    try:
        value, end = load_json_at(text, brace)
    except ValueError as error:
        expected = expected or _LIKE_A_CALL.match(text, brace) is not None
        if truncated and (expected or _cut_opening_of_a_call(text, brace)):
            return Truncated(brace, "the token cap cut the turn inside a call"), brace
        return Malformed("json", brace, f"not a JSON object: {error}") if expected else None, brace
    call = _read_call(value, brace)
    if call is None and expected:
        return Malformed("shape", brace, 'expected {"name": "...", "parameters": {...}}'), end
    return call, end


def _cut_opening_of_a_call(text: str, brace: int) -> bool:
    """Whether the text ends in the first characters of a call, too few to tell it from other JSON."""
    if len(text) - brace > 64:
        return False
    rest = "".join(text[brace:].split())
    return any(opening.startswith(rest) for opening in _CALL_OPENINGS)


def _between(text: str) -> str:
    """The text between two calls, without the separator and the tag."""
    text = text.replace(PYTHON_TAG, "")
    return "" if text.strip() in ("", ";") else text


def _read_call(value: dict[str, Any], position: int) -> ToolCall | Malformed | None:
    """The call that an object is; None if it is not one."""
    if "name" not in value or not ("arguments" in value or "parameters" in value):
        return None
    if not isinstance(value["name"], str) or not value["name"]:
        return Malformed("name", position, "the name of a call must be a string that is not empty")
    try:
        return ToolCall(value["name"], load_arguments(value["arguments" if "arguments" in value else "parameters"]))
    except TypeError as error:
        return Malformed("shape", position, str(error))
    except ValueError as error:
        return Malformed("json", position, f"parameters are not JSON: {error}")
