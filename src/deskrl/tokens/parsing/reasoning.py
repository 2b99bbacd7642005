"""Splitting a turn into its thought and the rest.

Policy: a thought is `<think>...</think>` at the start of a turn, or, where the prompt already opened it
(`prefilled`), everything up to the first `</think>`. A `<think>` anywhere else is ordinary text. Calls written in a
thought do not run. A turn that ends in a thought has nothing to run: it was cut by the token cap (truncated), or the
model stopped there (inside reasoning). It is never continued as if the thought had been closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deskrl.tokens.parsing.outcome import InsideReasoning, Truncated

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


@dataclass(frozen=True)
class Split:
    """`reasoning` (None: no thought), where the rest starts, and where a thought that never closes begins."""

    reasoning: str | None
    rest: int
    unclosed: int | None = None


def split_reasoning(text: str, *, prefilled: bool = False) -> Split:
    """Finds the thought of a turn."""
    start = len(text) - len(text.lstrip())
    opened = text.startswith(THINK_OPEN, start)
    if not opened and not prefilled:
        return Split(None, 0)
    # A model may repeat the opening that its prompt already holds.
    body = start + len(THINK_OPEN) if opened else 0
    end = text.find(THINK_CLOSE, body)
    if end < 0:
        return Split(text[body:].strip(), len(text), start if opened else 0)
    return Split(text[body:end].strip(), end + len(THINK_CLOSE))


def unclosed_thought(
    text: str, start: int, call_openings: Sequence[str], truncated: bool
) -> Truncated | InsideReasoning:
    """The outcome of a turn that ends in a thought."""
    if truncated:
        return Truncated(start, f"the token cap cut the thought before its {THINK_CLOSE}")
    found = [at for opening in call_openings if (at := text.find(opening, start)) >= 0]
    if found:
        return InsideReasoning(min(found), f"a tool call inside a thought without {THINK_CLOSE}")
    return InsideReasoning(start, f"the turn ended in a thought without {THINK_CLOSE}")
