"""The model's side of a conversation, behind one interface.

`TokenPolicy` is what trains: it keeps the token ledger and talks token ids. A chat-completions policy for
API models implements the same protocol without tokens (see `chat_policy`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from deskrl.agent.engine import CompletionsEngine
from deskrl.tokens import ParsedTurn, TokenLedger
from deskrl.tokens.parsing import parser_for
from deskrl.tokens.renderers import TurnRenderer


@dataclass(frozen=True)
class ModelTurn:
    """One turn of the model. `truncated` is None, `length` (per-turn cap) or `context_length`."""

    text: str
    parsed: ParsedTurn
    truncated: str | None
    tokens: int
    seconds: float
    tool_call_ids: list[str] = field(default_factory=list)


class Policy(Protocol):
    """A model in a conversation; calls come in the order start, (turn, tool_results | user_message)*."""

    async def start(self, messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]]) -> None:
        """Sets the system and user messages and the tools (OpenAI function schemas)."""

    async def turn(self) -> ModelTurn | None:
        """The model's next turn; None if no room is left in its context."""

    async def tool_results(self, results: Sequence[str]) -> None:
        """Adds the results of the last turn's calls, one each, in order."""

    async def user_message(self, text: str) -> None:
        """Adds a user message (a repair request)."""

    @property
    def context_left(self) -> float:
        """Share of the context still free, 0 to 1."""


@dataclass(frozen=True)
class TokenLimits:
    """Sizes in tokens: the model's whole context and the cap on one generation."""

    max_context: int
    max_turn: int


class TokenPolicy:
    """Token-in, token-out: samples from an engine and records every token in a ledger."""

    def __init__(
        self,
        engine: CompletionsEngine,
        renderer: TurnRenderer,
        limits: TokenLimits,
        *,
        sampling: Mapping[str, Any],
        session_id: str,
    ) -> None:
        self.ledger = TokenLedger(renderer.tokenizer.vocabulary_size)
        self._engine = engine
        self._renderer = renderer
        self._limits = limits
        self._sampling = sampling
        self._session_id = session_id
        self._parser = parser_for(renderer.call_syntax, prefilled_thought=renderer.prefilled_thought)
        self._schemas: dict[str, Any] = {}
        self._sampled: list[int] = []
        self._called: list[str] = []

    @property
    def context_left(self) -> float:
        """Share of the context still free, 0 to 1."""
        return max(0.0, 1.0 - len(self.ledger) / self._limits.max_context)

    async def start(self, messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]]) -> None:
        """Renders and records the prompt (the only full render of a trajectory)."""
        self.ledger.append_prompt(await asyncio.to_thread(self._renderer.prompt, messages, tools))
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}

    async def turn(self) -> ModelTurn | None:
        """Samples a turn, records it and closes it as the template would."""
        room = self._limits.max_context - len(self.ledger)
        if room <= 0:
            return None
        generation = await self._engine.generate(
            self.ledger.packed_ids,
            max_tokens=min(room, self._limits.max_turn),
            stop_token_ids=self._renderer.stop_token_ids,
            sampling=self._sampling,
            session_id=self._session_id,
        )
        self.ledger.append_generation(
            generation.ids,
            generation.logprobs,
            weight_version_start=generation.weight_version_start,
            weight_version_end=generation.weight_version_end,
            finish_reason=generation.finish_reason,
        )
        self.ledger.append_close(self._renderer.close(generation.ids))
        self._sampled = list(generation.ids)
        cut = generation.finish_reason == "length"
        parsed = self._parser.parse(self._renderer.text(generation.ids), self._schemas, truncated=cut)
        self._called = [call.name for call in parsed.calls]
        truncated = None
        if cut:
            truncated = "context_length" if room <= self._limits.max_turn else "length"
        text = self._renderer.tokenizer.decode(generation.ids, skip_special_tokens=True)
        return ModelTurn(text, parsed, truncated, len(generation.ids), generation.seconds)

    async def tool_results(self, results: Sequence[str]) -> None:
        """Encodes only the new text, off the event loop."""
        render = partial(self._renderer.observation, results, names=self._called, after=self._sampled)
        self.ledger.append_observation(await asyncio.to_thread(render))

    async def user_message(self, text: str) -> None:
        """Encodes only the new text, off the event loop."""
        render = partial(self._renderer.user_message, text, after=self._sampled)
        self.ledger.append_injected(await asyncio.to_thread(render))
