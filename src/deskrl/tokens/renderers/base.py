"""What a turn renderer is: the ids around a sampled turn, from the new text alone.

Model: a conversation is a prompt, then turn by turn what the model sampled, what still closes that turn, and what
answers it (tool results or a user message) up to the next generation prompt. Nothing sampled is rendered again.

Invariants:
- No method looks at earlier turns or at the tool schemas: the cost of a turn is that of its new text.
- How a turn ended is read off its sampled ids. A stop token that was sampled is not written again; one that was
  not (cut by length, another stop, nothing sampled) is synthesised, and is not for training.
- The prefill, the end of a generation prompt such as `<think>\\n`, is part of the prompt or the observation: the
  model sees it and is not trained on it.
- Control tokens come from the template only. Results and user text stay text, whatever they hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from deskrl.tokens.chat import ChatTokenizer, Message


class RendererError(ValueError):
    """This tokenizer or template does not fit the renderer, or no renderer fits it; the message says why."""


class TurnRenderer(Protocol):
    """The ids of prompts, closes and observations of one model family."""

    tokenizer: ChatTokenizer
    family: str
    """Name of the renderer, as in `renderer_for(tokenizer, family)`."""
    call_syntax: str
    """The parser family that reads this model's tool calls."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a run should know about this template, though it is no reason to refuse it."""

    @property
    def stop_token_ids(self) -> list[int]:
        """Ids at which the engine must stop; the id it stops at is part of the generation."""

    @property
    def prefill(self) -> str:
        """The reasoning opened (or opened and closed) by the generation prompt of the prompt; mostly empty."""

    @property
    def prefilled_thought(self) -> bool:
        """Whether the model's turns start inside reasoning, as its parser must know."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of the first prompt, generation prompt included. The only full render of a trajectory."""

    def text(self, generated: Sequence[int]) -> str:
        """What a parser reads of a sampled turn: all of it, control tokens and the stop token kept."""

    def inside_reasoning(self, generated: Sequence[int]) -> bool:
        """Whether the turn ended before its reasoning was closed."""

    def close(self, generated: Sequence[int]) -> list[int]:
        """Ids that complete the turn: its reasoning and its end, where the model did not sample them."""

    def observation(self, results: Sequence[str], *, names: Sequence[str] = (), after: Sequence[int] = ()) -> list[int]:
        """Ids of the results of the last turn's calls and the next generation prompt.

        Args:
            results: one text for each call, in order.
            names: the tools called, one each; needed by families that write them (gpt-oss).
            after: the sampled turn that is answered; needed by families whose stop token is the first token of
                what follows (GLM), which must not be written twice.
        """

    def user_message(self, text: str, *, after: Sequence[int] = ()) -> list[int]:
        """Ids of a user turn (a warning, a repair request) and the next generation prompt."""
