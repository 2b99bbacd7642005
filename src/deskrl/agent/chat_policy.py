"""An API model over `/v1/chat/completions`: evaluation only, no tokens are recorded."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

from deskrl.agent.engine import json_object, post_retrying
from deskrl.agent.errors import AgentConfigError, ContextOverflowError, EngineProtocolError
from deskrl.agent.policy import ModelTurn
from deskrl.tokens import Malformed, ParsedTurn, ToolCall
from deskrl.tokens.hermes import load_json


class ChatPolicy:
    """Any OpenAI-compatible chat endpoint.

    Args:
        base_url: up to and without `/v1`.
        api_key: sent as a bearer token if given; never logged or written.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None,
        max_turn: int,
        sampling: Mapping[str, Any],
        timeout_s: float = 1800.0,
        retry_s: float = 60.0,
    ) -> None:
        # A bare host gets the usual path; an address with one (`.../v1`, `.../v1beta/openai`) is taken as it is.
        base = base_url.rstrip("/")
        self._url = base + ("/chat/completions" if urlsplit(base).path else "/v1/chat/completions")
        self._model = model
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._max_turn = max_turn
        self._sampling = sampling
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._messages: list[dict[str, Any]] = []
        self._tools: list[dict[str, Any]] = []
        self._pending: list[str] = []

    @property
    def context_left(self) -> float:
        """An API does not say how much is left: always 1."""
        return 1.0

    async def start(self, messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]]) -> None:
        """Keeps the messages; nothing is sent yet."""
        self._messages = [dict(m) for m in messages]
        self._tools = [dict(t) for t in tools]

    async def turn(self) -> ModelTurn | None:
        """One chat completion.

        Raises:
            ContextOverflowError: the endpoint says that the conversation is too long.
            AgentConfigError: the endpoint refuses the API key.
            EngineUnavailableError, EngineProtocolError: see `CompletionsEngine.generate`.
        """
        body: dict[str, Any] = {
            **self._sampling,
            "model": self._model,
            "messages": self._messages,
            "max_tokens": self._max_turn,
        }
        if self._tools:
            body["tools"] = self._tools
        started = time.monotonic()
        async with httpx.AsyncClient() as client:
            response = await post_retrying(
                client, self._url, lambda: body, self._headers, self._timeout_s, self._retry_s
            )
        if response.status_code == 400 and "context" in response.text:
            raise ContextOverflowError(response.text[:500])
        if response.status_code in (401, 403):
            raise AgentConfigError(f"{self._url} refuses the API key: HTTP {response.status_code}")
        answer = json_object(response)
        try:
            choice = answer["choices"][0]
            message = dict(choice["message"])
            text = str(message.get("content") or "")
            parsed, pending = _read_calls(text, message.get("tool_calls") or [])
        except (KeyError, IndexError, TypeError) as error:
            raise EngineProtocolError(f"{self._url}: not a chat completion, {error!r}: {str(answer)[:200]}") from error
        self._messages.append({k: v for k, v in message.items() if k in ("role", "content", "tool_calls") and v})
        self._pending = pending
        tokens = int((answer.get("usage") or {}).get("completion_tokens") or 0)
        truncated = "length" if choice.get("finish_reason") == "length" else None
        return ModelTurn(text, parsed, truncated, tokens, time.monotonic() - started, list(self._pending))

    async def tool_results(self, results: Sequence[str]) -> None:
        """Adds one `tool` message for each call of the last turn."""
        for call_id, text in zip(self._pending, results, strict=True):
            self._messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    async def user_message(self, text: str) -> None:
        """Adds a user message, after answering calls that could not be read."""
        for call_id in self._pending:
            self._messages.append({"role": "tool", "tool_call_id": call_id, "content": "not executed"})
        self._messages.append({"role": "user", "content": text})


def _read_calls(text: str, raw: Sequence[Mapping[str, Any]]) -> tuple[ParsedTurn, list[str]]:
    calls: list[ToolCall] = []
    ids = [str(call["id"]) for call in raw]
    for position, call in enumerate(raw):
        function = call["function"]
        try:
            arguments = load_json(function.get("arguments") or "{}")
        except (ValueError, RecursionError) as error:
            return ParsedTurn(text, malformed=Malformed("json", position, str(error))), ids
        if not isinstance(arguments, dict):
            return ParsedTurn(text, malformed=Malformed("shape", position, "arguments must be an object")), ids
        calls.append(ToolCall(function["name"], arguments))
    return ParsedTurn(text, tuple(calls)), ids
