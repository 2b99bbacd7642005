"""gpt-oss: a turn is several messages, each on a channel, and ends with `<|return|>` or `<|call|>`.

`<|end|>` only ends a message: the engine must not stop at it, and a turn cut right after one needs no close. A turn
cut inside a message gets the token that ends such a message: `<|call|>` if it is addressed to a tool, else `<|end|>`.
"""

from __future__ import annotations

from collections.abc import Sequence

from deskrl.tokens.chat import ChatTokenizer
from deskrl.tokens.renderers.families import HARMONY
from deskrl.tokens.renderers.generic import TemplateRenderer

START, MESSAGE, CHANNEL = "<|start|>", "<|message|>", "<|channel|>"
END, CALL = "<|end|>", "<|call|>"


class HarmonyRenderer(TemplateRenderer):
    """The generic renderer with harmony's ends."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        super().__init__(tokenizer, HARMONY)

    def inside_reasoning(self, generated: Sequence[int]) -> bool:
        """Whether the turn ended inside a message on the analysis channel."""
        header, message = self._last_message(generated)
        return message and "analysis" in header.partition(CHANNEL)[2].split() and "to=" not in header

    def close(self, generated: Sequence[int]) -> list[int]:
        """Ids that complete the turn."""
        if generated and generated[-1] in {*self._ends, self.tokenizer.control_tokens[END]}:
            return []
        return [self.tokenizer.control_tokens[CALL if "to=" in self._last_message(generated)[0] else END]]

    def _last_message(self, generated: Sequence[int]) -> tuple[str, bool]:
        """The header of the message that the turn ended in, and whether its text had begun and not ended."""
        if generated and generated[-1] in {*self._ends, self.tokenizer.control_tokens[END]}:
            return "", False
        header, begun, _ = self.text(generated).rpartition(START)[2].partition(MESSAGE)
        return header, bool(begun)
