"""Where reasoning starts and ends in a turn: at its start, between an opening and a closing tag, once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningTags:
    """The tags, and the text that ends a cut thought as the template would have ended it."""

    opening: str = "<think>"
    closing: str = "</think>"
    end: str = "\n</think>\n\n"

    def prefill(self, generation_prompt: str) -> str:
        """The part of a generation prompt that belongs to the model's turn."""
        start = generation_prompt.find(self.opening)
        if start < 0:
            start = generation_prompt.find(self.closing)
        return "" if start < 0 else generation_prompt[start:]

    def is_open(self, turn: str) -> bool:
        """Whether a turn (prefill included) began reasoning and did not end it."""
        return turn.lstrip().startswith(self.opening) and self.closing not in turn


THINK = ReasoningTags()
