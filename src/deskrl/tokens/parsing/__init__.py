"""Parsers: from the text of one assistant turn to its thought, its message and its tool calls.

One file per family, one set of outcomes (`outcome`), one way to split off the thought (`reasoning`), one way to type
arguments that a family writes as plain text (`schema`). A parser never raises on what a model wrote, and takes time
linear in it.
"""

from deskrl.tokens.parsing.outcome import InsideReasoning, Malformed, Outcome, ParsedTurn, ToolCall, Truncated
from deskrl.tokens.parsing.reasoning import Split, split_reasoning
from deskrl.tokens.parsing.registry import FAMILIES, Parser, parser_for
from deskrl.tokens.parsing.schema import ArgumentTypes, JsonSchema, TypeMismatch

__all__ = [
    "FAMILIES",
    "ArgumentTypes",
    "InsideReasoning",
    "JsonSchema",
    "Malformed",
    "Outcome",
    "ParsedTurn",
    "Parser",
    "Split",
    "ToolCall",
    "Truncated",
    "TypeMismatch",
    "parser_for",
    "split_reasoning",
]
