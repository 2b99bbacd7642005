"""What a parser found in one assistant turn.

A turn has exactly one outcome: its calls run (possibly none), or one reason says why none of them does. All or
nothing: a good call beside a broken one does not run, because a model that is paid for half a turn learns to write
such turns. Positions are character offsets into the text that was parsed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """How a turn was read."""

    OK = "ok"
    MALFORMED = "malformed"
    TRUNCATED = "truncated"
    INSIDE_REASONING = "inside_reasoning"


@dataclass(frozen=True)
class ToolCall:
    """One call: tool name and arguments (always a dict)."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Malformed:
    """A tool call that cannot be read: kind, character position in the turn, and what is wrong.

    Kinds: `unterminated` (an opening without its close), `stray` or `stray_close` (a piece of a call outside one),
    `json` (not JSON), `shape` (JSON or tags, but no call), `name` (no usable tool name), `duplicate` (an argument
    given twice), `tag_in_value` (a value that holds the family's own tags), `type` (a value that does not fit the
    tool's schema), `recipient` (harmony: addressed to what is no function).
    """

    kind: str
    position: int
    detail: str


@dataclass(frozen=True)
class Truncated:
    """The token cap cut the turn inside a call or a thought that starts at `position`."""

    position: int
    detail: str


@dataclass(frozen=True)
class InsideReasoning:
    """The model ended its turn in an unclosed thought; `position` is that of the first call in it, else its start."""

    position: int
    detail: str


@dataclass(frozen=True)
class ParsedTurn:
    """A turn read: the text outside the blocks, and either the calls or the reason why not.

    `content` and `reasoning` are stripped. `reasoning` is None if the turn has no thought, "" if it has an empty one.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    malformed: Malformed | None = None
    reasoning: str | None = None
    truncated: Truncated | None = None
    inside_reasoning: InsideReasoning | None = None

    def __post_init__(self) -> None:
        found = [self.calls or None, self.malformed, self.truncated, self.inside_reasoning]
        if sum(each is not None for each in found) > 1:
            raise ValueError(f"a turn has either calls or one reason for having none, got {self!r:.300}")

    @property
    def outcome(self) -> Outcome:
        """Which of the four it is."""
        if self.malformed is not None:
            return Outcome.MALFORMED
        if self.truncated is not None:
            return Outcome.TRUNCATED
        if self.inside_reasoning is not None:
            return Outcome.INSIDE_REASONING
        return Outcome.OK


Problem = Malformed | Truncated | InsideReasoning


def turn(
    content: list[str], calls: list[ToolCall], problem: Problem | None = None, reasoning: str | None = None
) -> ParsedTurn:
    """The turn made of these pieces; with a problem none of the calls counts."""
    return ParsedTurn(
        "".join(content).strip(),
        () if problem is not None else tuple(calls),
        problem if isinstance(problem, Malformed) else None,
        reasoning,
        problem if isinstance(problem, Truncated) else None,
        problem if isinstance(problem, InsideReasoning) else None,
    )
