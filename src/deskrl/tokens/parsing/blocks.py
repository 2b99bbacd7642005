"""Scanning `<tool_call>...</tool_call>` blocks, shared by the families that use them (Hermes, Qwen XML, GLM).

The text outside the blocks is the message. Openings and closes are counted: one that lacks its partner, or a family's
inner tag outside any block, makes the turn malformed. Linear time: a character is scanned once per tag, and the first
problem ends the scan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deskrl.tokens.parsing.outcome import Malformed, ParsedTurn, Problem, ToolCall, Truncated, turn
from deskrl.tokens.parsing.reasoning import split_reasoning, unclosed_thought
from deskrl.tokens.parsing.stops import end_of_turn

OPEN = "<tool_call>"
CLOSE = "</tool_call>"

# Reads one call from text[start:end], the inside of a block.
ReadCall = Callable[[str, int, int], ToolCall | Malformed]


def parse_blocks(
    text: str,
    read_call: ReadCall,
    *,
    prefilled: bool,
    truncated: bool,
    inner_tags: Sequence[str] = (),
    stops: Sequence[str] = (),
) -> ParsedTurn:
    """Reads a whole turn of a family whose calls stand in `<tool_call>` blocks."""
    text = text[: end_of_turn(text, stops)]
    split = split_reasoning(text, prefilled=prefilled)
    if split.unclosed is not None:
        problem = unclosed_thought(text, split.unclosed, (OPEN, *inner_tags), truncated)
        return turn([], [], problem, split.reasoning)
    content: list[str] = []
    calls: list[ToolCall] = []
    found = _scan(text, split.rest, read_call, inner_tags, truncated, content, calls)
    return turn(content, calls, found, split.reasoning)


def _scan(
    text: str,
    position: int,
    read_call: ReadCall,
    inner_tags: Sequence[str],
    truncated: bool,
    content: list[str],
    calls: list[ToolCall],
) -> Problem | None:
    while True:
        start = text.find(OPEN, position)
        outside = len(text) if start < 0 else start
        content.append(text[position:outside])
        stray = _first_stray(text, position, outside, inner_tags)
        if stray is not None:
            return stray
        if start < 0:
            return cut_opening(text, position, (OPEN, *inner_tags)) if truncated else None
        body = start + len(OPEN)
        end = text.find(CLOSE, body)
        nested = text.find(OPEN, body, end if end >= 0 else len(text))
        if end < 0 and nested < 0 and truncated:
            return Truncated(start, f"the token cap cut the turn after {OPEN}, before {CLOSE}")
        if end < 0 or nested >= 0:
            return Malformed("unterminated", start, f"{OPEN} without {CLOSE}")
        call = read_call(text, body, end)
        if isinstance(call, Malformed):
            return call
        calls.append(call)
        position = end + len(CLOSE)


def _first_stray(text: str, start: int, end: int, inner_tags: Sequence[str]) -> Malformed | None:
    found = [(at, tag) for tag in (CLOSE, *inner_tags) if (at := text.find(tag, start, end)) >= 0]
    if not found:
        return None
    at, tag = min(found)
    return Malformed("stray_close" if tag == CLOSE else "stray", at, f"{tag} without {OPEN}")


def cut_opening(text: str, start: int, openings: Sequence[str]) -> Truncated | None:
    """Where a cut text ends in the first characters of an opening, the call those characters begin."""
    for opening in openings:
        for length in range(min(len(opening) - 1, len(text) - start), 0, -1):
            if text.endswith(opening[:length]):
                return Truncated(len(text) - length, f"the token cap cut the turn inside {opening}")
    return None


def skip_space(text: str, start: int, end: int) -> int:
    """The offset of the first character at or after `start` that is no white space."""
    while start < end and text[start].isspace():
        start += 1
    return start
