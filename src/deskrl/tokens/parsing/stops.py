"""Stop tokens at the end of a turn: the ledger keeps their ids, the text of the message does not show them."""

from __future__ import annotations

from collections.abc import Sequence


def end_of_turn(text: str, stops: Sequence[str]) -> int:
    """The offset where the turn's text ends: before one stop token, if it ends in one."""
    stripped = text.rstrip()
    for stop in stops:
        if stripped.endswith(stop):
            return len(stripped) - len(stop)
    return len(text)
