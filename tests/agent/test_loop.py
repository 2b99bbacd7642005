"""The loop over a scripted model: every way a conversation ends, and what the model is told on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from deskrl.agent.catalogue import Tool, make_tool
from deskrl.agent.errors import ContextOverflowError, EngineUnavailableError, WorldLostError
from deskrl.agent.loop import LoopLimits, LoopState, StopReason, run_loop
from deskrl.agent.mcp_session import ToolResult
from deskrl.agent.policy import ModelTurn
from deskrl.tokens import parse_hermes

TOOLS = [make_tool("files_read", "Reads.\nMore.", {"type": "object", "properties": {"path": {"type": "string"}}})]
BAD = '<tool_call>{"name": </tool_call>'


def call(path: str, name: str = "files_read") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{"path": "{path}"}}}}</tool_call>'


def cut(text: str, reason: str) -> ModelTurn:
    return ModelTurn(text, parse_hermes(text), reason, 3, 0.5)


@dataclass
class Script:
    """A model that says what it is told to, and keeps what it heard."""

    says: list[str | ModelTurn | Exception | None]
    left: list[float] = field(default_factory=lambda: [1.0])
    heard: list[Any] = field(default_factory=list)

    @property
    def context_left(self) -> float:
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]

    async def start(self, messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]]) -> None:
        self.heard.append((list(messages), list(tools)))

    async def turn(self) -> ModelTurn | None:
        said = self.says.pop(0)
        if isinstance(said, Exception):
            raise said
        if isinstance(said, str):
            return ModelTurn(said, parse_hermes(said), None, 2, 0.25)
        return said

    async def tool_results(self, results: Sequence[str]) -> None:
        self.heard.append(list(results))

    async def user_message(self, text: str) -> None:
        self.heard.append(text)


async def echo(tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
    path = arguments["path"]
    return ToolResult(f"{tool.name}:{path}", ok=not path.startswith("absent"))


async def converse(script: Script, **limits: Any) -> LoopState:
    state = LoopState()
    reason = await run_loop(script, echo, TOOLS, "Do it.", LoopLimits(**limits), state)
    assert reason is state.stop_reason
    return state


async def test_an_answer_at_once() -> None:
    script = Script([" Done. "])
    state = await converse(script)
    assert state.stop_reason is StopReason.ANSWER
    assert [m["role"] for m in state.messages] == ["system", "user", "assistant"]
    assert state.messages[1]["content"] == "Do it." and state.messages[-1]["content"] == " Done. "
    messages, tools = script.heard[0]
    assert messages == state.messages[:2]
    assert tools[0]["function"]["description"] == "Reads."


async def test_calls_run_in_order_and_their_results_return_together() -> None:
    script = Script(["Look. " + call("a") + call("absent") + call("b"), "Done."])
    state = await converse(script)
    assert script.heard[1:] == [["files_read:a", "files_read:absent", "files_read:b"]]
    assert state.messages[2] == {
        "role": "assistant",
        "content": "Look.",
        "tool_calls": [{"name": "files_read", "arguments": {"path": p}} for p in ("a", "absent", "b")],
    }
    assert [m["content"] for m in state.messages if m["role"] == "tool"] == script.heard[1]
    assert [(s.turn, s.tokens, s.model_seconds) for s in state.steps] == [(0, 2, 0.25), (1, 2, 0.25)]
    # A tool's own failure is text for the model and counted as a failure.
    assert [t.ok for t in state.steps[0].tools] == [True, False, True]


async def test_an_unknown_tool_is_told_to_the_model() -> None:
    script = Script([call("a", "files_raed"), "Done."])
    state = await converse(script)
    assert script.heard[1] == ["Error: there is no tool 'files_raed'. Tools: files_read"]
    assert state.stop_reason is StopReason.ANSWER and not state.steps[0].tools[0].ok


async def test_unreadable_calls_are_repaired_or_end_it() -> None:
    script = Script([BAD, BAD, BAD])
    state = await converse(script, max_repairs=2)
    assert state.stop_reason is StopReason.MALFORMED
    assert len(script.heard) == 3 and all("could not be read: not a JSON object" in text for text in script.heard[1:])
    # What the model wrote stays in the record as it wrote it.
    assert [m["content"] for m in state.messages if m["role"] == "assistant"] == [BAD] * 3


async def test_a_readable_turn_resets_the_repairs() -> None:
    script = Script([BAD, call("a"), BAD, call("b"), BAD, "Done."])
    state = await converse(script, max_repairs=1)
    assert state.stop_reason is StopReason.ANSWER


async def test_a_good_call_beside_a_bad_one_does_not_run() -> None:
    script = Script([call("a") + "<tool_call>{", "Done."])
    state = await converse(script)
    assert [t for s in state.steps for t in s.tools] == []
    assert isinstance(script.heard[1], str)


@pytest.mark.parametrize("reason", [StopReason.LENGTH, StopReason.CONTEXT_LENGTH])
@pytest.mark.parametrize("text", ["half an ans", "<think>half a thou", "<think>maybe " + call("a"), "<tool_call>{", ""])
async def test_a_turn_cut_short_ends_it(reason: StopReason, text: str) -> None:
    state = await converse(Script([cut(text, reason.value)]))
    assert state.stop_reason is reason


async def test_a_turn_cut_after_a_whole_call_goes_on() -> None:
    script = Script([cut(call("a") + " and", "length"), "Done."])
    state = await converse(script)
    assert state.stop_reason is StopReason.ANSWER and script.heard[1] == ["files_read:a"]


@pytest.mark.parametrize("end", [None, ContextOverflowError("too long")])
async def test_no_room_left(end: Exception | None) -> None:
    state = await converse(Script([call("a"), end]))
    assert state.stop_reason is StopReason.CONTEXT_LENGTH
    assert state.messages[-1] == {"role": "tool", "content": "files_read:a"}


async def test_turns_run_out() -> None:
    state = await converse(Script([call("a")] * 3), max_turns=3)
    assert state.stop_reason is StopReason.MAX_TURNS and len(state.steps) == 3


async def test_little_context_is_warned_about_once() -> None:
    script = Script([call("a"), call("a") + call("b"), call("a"), "Done."], left=[0.5, 0.1, 0.05])
    state = await converse(script)
    first, second, third = script.heard[1:]
    assert "context" not in first[0] + second[0] + third[0]
    assert second[1].startswith("files_read:b\n\n[") and "of your context is left" in second[1]
    assert second[1] in [m["content"] for m in state.messages]


async def test_long_results_are_clipped() -> None:
    script = Script([call("x" * 500), "Done."])
    await converse(script, tool_result_characters=90)
    (text,) = script.heard[1]
    assert text.startswith("files_read:xxx") and "characters left out" in text and len(text) < 150


async def test_failures_of_world_and_engine_pass_through_with_the_record_kept() -> None:
    async def lost(tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
        raise WorldLostError("gone")

    state = LoopState()
    with pytest.raises(WorldLostError):
        await run_loop(Script([call("a")]), lost, TOOLS, "Do it.", LoopLimits(), state)
    assert state.stop_reason is None and state.messages[-1]["role"] == "assistant"
    with pytest.raises(EngineUnavailableError):
        await run_loop(Script([EngineUnavailableError("x")]), echo, TOOLS, "Do it.", LoopLimits(), LoopState())
