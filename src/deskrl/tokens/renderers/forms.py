"""The fixed texts of a template around what is new in a turn, and how they become ids.

A tail is everything a template writes after a sampled turn: its end, the results or the user's text, the next
generation prompt. `Forms` holds both tails with holes for the new texts.

Two kinds of end exist. A terminator (`<|im_end|>`, `<|eot_id|>`) belongs to the turn and is written by its close.
An opener (GLM's `<|user|>`, `<|observation|>`) is the first token of what follows, so the close writes none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deskrl.tokens.chat import Piece, Trust
from deskrl.tokens.renderers.base import RendererError
from deskrl.tokens.renderers.reasoning import ReasoningTags

# What templates do to a text before they write it, the likeliest first.
TRANSFORMS: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "as JSON": lambda text: json.dumps(text, ensure_ascii=False),
    "as ASCII JSON": json.dumps,
    "trimmed": str.strip,
    "trimmed, as JSON": lambda text: json.dumps(text.strip(), ensure_ascii=False),
    "trimmed on the left": str.lstrip,
    "trimmed on the right": str.rstrip,
    "without newlines around it": lambda text: text.strip("\n"),
}

NAME_HOLE = "\x00"
"""Stands for the called tool's name in a `ResultForm`; no template and no name can hold it."""


@dataclass(frozen=True)
class UserForm:
    """before TEXT after."""

    before: str
    after: str
    transform: str = "as it is"

    def pieces(self, text: str) -> list[Piece]:
        """The turn with its text filled in."""
        return [
            (self.before, Trust.TEMPLATE),
            (TRANSFORMS[self.transform](text), Trust.FOREIGN),
            (self.after, Trust.TEMPLATE),
        ]


@dataclass(frozen=True)
class ResultForm:
    """before RESULT (between RESULT)* after; `before` and `between` may name the tool."""

    before: str
    between: str
    after: str
    transform: str = "as it is"

    @property
    def needs_names(self) -> bool:
        """Whether a result is written with the name of its tool."""
        return NAME_HOLE in self.before + self.between

    def pieces(self, results: Sequence[str], names: Sequence[str]) -> list[Piece]:
        """The results filled in.

        Raises:
            RendererError: no result, or not one name for each where they are needed.
        """
        if not results:
            raise RendererError("an observation needs at least one result")
        if self.needs_names and len(names) != len(results):
            raise RendererError(
                f"this family writes the tool's name with each result: {len(results)} results, {len(names)} names"
            )
        pieces: list[Piece] = []
        for number, result in enumerate(results):
            fixed, *more = (self.between if number else self.before).split(NAME_HOLE)
            pieces.append((fixed, Trust.TEMPLATE))
            for part in more:
                pieces += [(names[number], Trust.FOREIGN), (part, Trust.TEMPLATE)]
            pieces.append((TRANSFORMS[self.transform](result), Trust.FOREIGN))
        return [*pieces, (self.after, Trust.TEMPLATE)]


@dataclass(frozen=True)
class Forms:
    """What a template writes after a sampled turn.

    Args:
        end: the terminator a close synthesises, or "" where the turn is ended by the opener of what follows.
        call_end: what the template itself ends a turn of calls with; only gpt-oss has another token for it.
        after_end: text after a terminator, before any next message (ChatML's newline).
        ends: tokens that, sampled last, mean that the turn ended.
        result: the results' tail, from its opener on or after the terminator and `after_end`.
        user: the user turn's tail, likewise.
        prefill: what a prompt's generation prompt holds of the model's turn.
        template_tools: whether the template renders tool definitions.
        template_calls: whether it renders calls and their results; if not, results go into user turns.
        call_example: a turn of one call as the template writes it, without its end; "" if it writes none.
    """

    end: str
    call_end: str
    after_end: str
    ends: frozenset[str]
    result: ResultForm
    user: UserForm
    reasoning: ReasoningTags
    prefill: str
    template_tools: bool
    template_calls: bool
    call_example: str = ""
    call_content: str | None = ""
    arguments_as_text: bool = False
    shows_reasoning: bool = False
