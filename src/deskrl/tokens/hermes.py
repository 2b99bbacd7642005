"""Hermes tool calls: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, typed outcomes.

Policy: a `<think>` block at the start of a turn is thought, calls written in it (or after one that never
closes) do not run. The text outside the blocks is the message. A turn whose blocks do not all parse is malformed as a
whole (none of its calls runs), and says which block, where and why. Linear time: one scan, no backtracking.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


@dataclass(frozen=True)
class ToolCall:
    """One call: tool name and arguments (always a dict)."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Malformed:
    """A tool call that cannot be read: kind, character position in the turn, and what is wrong."""

    kind: str
    position: int
    detail: str


@dataclass(frozen=True)
class ParsedTurn:
    """A turn read: the text outside the blocks, and either the calls or the reason why not."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    malformed: Malformed | None = None


def parse_hermes(text: str) -> ParsedTurn:
    """Reads the tool calls of one assistant turn.

    Malformed kinds: `unterminated` (an opening without its close), `stray_close`, `json`, `shape`.
    """
    position = _after_thought(text)
    content = [text[:position]]
    calls: list[ToolCall] = []
    while True:
        start = text.find(OPEN, position)
        outside = text[position:] if start < 0 else text[position:start]
        content.append(outside)
        stray = outside.find(CLOSE)
        if stray >= 0:
            problem = Malformed("stray_close", position + stray, f"{CLOSE} without {OPEN}")
            return ParsedTurn(_joined(content), malformed=problem)
        if start < 0:
            return ParsedTurn(_joined(content), tuple(calls))
        body = start + len(OPEN)
        end = text.find(CLOSE, body)
        nested = text.find(OPEN, body, end if end >= 0 else None)
        if end < 0 or nested >= 0:
            return ParsedTurn(_joined(content), malformed=Malformed("unterminated", start, f"{OPEN} without {CLOSE}"))
        call = _parse_call(text[body:end], body)
        if isinstance(call, Malformed):
            return ParsedTurn(_joined(content), malformed=call)
        calls.append(call)
        position = end + len(CLOSE)


def _after_thought(text: str) -> int:
    start = len(text) - len(text.lstrip())
    if not text.startswith(THINK_OPEN, start):
        return 0
    end = text.find(THINK_CLOSE, start)
    return len(text) if end < 0 else end + len(THINK_CLOSE)


def _joined(parts: list[str]) -> str:
    return "".join(parts).strip()


def _parse_call(body: str, position: int) -> ToolCall | Malformed:
    try:
        value = load_json(body)
    except (ValueError, RecursionError) as error:
        return Malformed("json", position, f"not a JSON object: {error}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return Malformed("shape", position, 'expected {"name": "...", "arguments": {...}}')
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        # Some models write the arguments as a JSON string of an object.
        try:
            arguments = load_json(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            return Malformed("json", position, f"arguments are not JSON: {error}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return Malformed("shape", position, f"arguments must be an object, got {type(arguments).__name__}")
    return ToolCall(value["name"], arguments)


def load_json(text: str) -> Any:
    """JSON that can also be written again: no NaN, no infinity, no half of a surrogate pair."""
    value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse(digits)
