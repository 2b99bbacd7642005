"""The Hermes reading of a turn without tools at hand: `parse_hermes` and the names that come with it.

The parser itself is `deskrl.tokens.parsing`; here the thought stays part of the content, as a message shows it.
"""

from __future__ import annotations

from dataclasses import replace

from deskrl.tokens.parsing.blocks import CLOSE, OPEN
from deskrl.tokens.parsing.hermes import HermesParser
from deskrl.tokens.parsing.jsonvalue import load_json
from deskrl.tokens.parsing.outcome import Malformed, ParsedTurn, ToolCall
from deskrl.tokens.parsing.reasoning import THINK_CLOSE, THINK_OPEN, split_reasoning

__all__ = [
    "CLOSE",
    "OPEN",
    "THINK_CLOSE",
    "THINK_OPEN",
    "Malformed",
    "ParsedTurn",
    "ToolCall",
    "load_json",
    "parse_hermes",
]


def parse_hermes(text: str) -> ParsedTurn:
    """Reads the tool calls of one assistant turn; kinds of malformed turns are those of `Malformed`."""
    parsed = HermesParser().parse(text, {})
    thought = text[: split_reasoning(text).rest]
    return replace(parsed, content=(thought + _after(thought, text, parsed)).strip()) if thought else parsed


def _after(thought: str, text: str, parsed: ParsedTurn) -> str:
    # The parser strips the content; what stood between it and the thought is white space of the text.
    rest = text[len(thought) :]
    return rest[: len(rest) - len(rest.lstrip())] + parsed.content
