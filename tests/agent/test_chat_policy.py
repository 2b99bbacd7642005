"""The chat policy against real HTTP: a conversation with tools goes round, and failures have their class."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from agent_servers import Scripted, serve

from deskrl.agent.chat_policy import ChatPolicy
from deskrl.agent.errors import (
    AgentConfigError,
    ContextOverflowError,
    EngineProtocolError,
    EngineUnavailableError,
)
from deskrl.tokens import ToolCall

START = [{"role": "system", "content": "S"}, {"role": "user", "content": "q"}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]


def choice(finish_reason: str = "stop", **message: Any) -> dict[str, Any]:
    return {
        "choices": [{"message": {"role": "assistant", **message}, "finish_reason": finish_reason}],
        "usage": {"completion_tokens": 11},
    }


def called(call_id: str, arguments: str, name: str = "f") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@asynccontextmanager
async def chat(
    *replies: Any, key: str | None = "secret", retry_s: float = 20
) -> AsyncIterator[tuple[ChatPolicy, Scripted]]:
    script = Scripted(list(replies))
    async with serve("/v1/chat/completions", script.answer) as base_url:
        policy = ChatPolicy(
            base_url, "m", api_key=key, max_turn=7, sampling={"temperature": 0}, timeout_s=20, retry_s=retry_s
        )
        await policy.start(START, TOOLS)
        yield policy, script


async def test_calls_go_round() -> None:
    calls = [called("c1", '{"a": 1}'), called("c2", "")]
    async with chat(choice("tool_calls", content=None, tool_calls=calls, refusal=None), choice(content="Done.")) as (
        policy,
        server,
    ):
        turn = await policy.turn()
        assert turn is not None and turn.parsed.calls == (ToolCall("f", {"a": 1}), ToolCall("f", {}))
        assert (turn.tokens, turn.truncated, turn.tool_call_ids) == (11, None, ["c1", "c2"])
        await policy.tool_results(["one", "two"])
        last = await policy.turn()
        assert last is not None and last.text == "Done." and last.parsed.calls == ()
    first, second = server.bodies
    assert first == {"temperature": 0, "model": "m", "messages": START, "max_tokens": 7, "tools": TOOLS}
    assert server.headers[0]["authorization"] == "Bearer secret"
    assert second["messages"] == [
        *START,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
    ]


@pytest.mark.parametrize("arguments", ["{", "[1]", '{"a": NaN}', '{"a": "\\ud800"}', "[" * 100_000])
async def test_unreadable_arguments_are_answered_before_the_repair(arguments: str) -> None:
    async with chat(
        choice(tool_calls=[called("c1", "{}"), called("c2", arguments)]), choice(content="ok"), key=None
    ) as (
        policy,
        server,
    ):
        turn = await policy.turn()
        assert turn is not None and turn.parsed.malformed is not None and turn.parsed.malformed.position == 1
        await policy.user_message("again")
        await policy.turn()
    assert [m["role"] for m in server.bodies[1]["messages"][3:]] == ["tool", "tool", "user"]
    assert "authorization" not in server.headers[0]


async def test_a_cut_turn_says_so() -> None:
    async with chat(choice("length", content="half")) as (policy, _):
        turn = await policy.turn()
        assert turn is not None and turn.truncated == "length"


async def test_a_busy_endpoint_is_asked_again() -> None:
    async with chat((429, "slow down"), (500, "oops"), choice(content="ok")) as (policy, server):
        turn = await policy.turn()
        assert turn is not None and turn.text == "ok"
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ((400, "maximum context length is 8"), ContextOverflowError),
        ((400, "unknown parameter"), EngineProtocolError),
        ((401, "who are you"), AgentConfigError),
        ((503, "down"), EngineUnavailableError),
        ((200, "<html>"), EngineProtocolError),
        ({"error": "x"}, EngineProtocolError),
        ({"choices": []}, EngineProtocolError),
        (choice(tool_calls=[{"id": "c"}]), EngineProtocolError),
    ],
)
async def test_failures_have_their_class_and_keep_the_key_to_themselves(reply: Any, error: type[Exception]) -> None:
    async with chat(reply, retry_s=0.1) as (policy, _):
        with pytest.raises(error) as caught:
            await policy.turn()
    assert "secret" not in str(caught.value)


async def test_messages_are_copied_at_the_start() -> None:
    async with chat(choice(content="ok")) as (policy, server):
        await policy.turn()
    assert json.dumps(server.bodies[0]["messages"]) == json.dumps(START)
    assert policy.context_left == 1.0 and len(START) == 2
