"""The agent loop: turns of the model, calls of tools, until an answer or a limit.

Pure orchestration over a `Policy` and a tool caller: no HTTP, no files. It returns normally for everything
the model can do (answer, run into a limit, write calls nobody can read) with a typed stop reason, and lets
failures of engine and world pass through as the exceptions of `deskrl.agent.errors`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from deskrl.agent import prompts
from deskrl.agent.catalogue import Tool, compact
from deskrl.agent.errors import ContextOverflowError
from deskrl.agent.mcp_session import ToolResult
from deskrl.agent.policy import ModelTurn, Policy
from deskrl.tokens import ToolCall

CallTool = Callable[[Tool, Mapping[str, Any]], Awaitable[ToolResult]]


class StopReason(StrEnum):
    """How a conversation ended."""

    ANSWER = "answer"
    MAX_TURNS = "max_turns"
    LENGTH = "length"
    CONTEXT_LENGTH = "context_length"
    MALFORMED = "malformed_tool_call"


@dataclass(frozen=True)
class LoopLimits:
    """Turns at most, repairs of unreadable calls in a row, characters of a tool result, context warning share."""

    max_turns: int = 100
    max_repairs: int = 2
    tool_result_characters: int = 42_000
    warn_below: float = 0.2


@dataclass(frozen=True)
class ToolStep:
    """One executed call."""

    name: str
    ok: bool
    seconds: float


@dataclass(frozen=True)
class Step:
    """One turn: sizes in tokens, times in seconds."""

    turn: int
    tokens: int
    model_seconds: float
    tools: list[ToolStep] = field(default_factory=list)


@dataclass
class LoopState:
    """The conversation so far; filled as it goes, so that a timeout loses nothing."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    stop_reason: StopReason | None = None
    warned: bool = False


async def run_loop(
    policy: Policy,
    call_tool: CallTool,
    tools: Sequence[Tool],
    instruction: str,
    limits: LoopLimits,
    state: LoopState,
) -> StopReason:
    """Runs one conversation into `state` and returns why it stopped."""
    by_name = {tool.name: tool for tool in tools}
    state.messages += [
        {"role": "system", "content": prompts.SYSTEM},
        {"role": "user", "content": instruction},
    ]
    await policy.start(state.messages[:2], [compact(tool) for tool in tools])
    repairs = 0
    for _ in range(limits.max_turns):
        try:
            turn = await policy.turn()
        except ContextOverflowError:
            turn = None
        if turn is None:
            return _stop(state, StopReason.CONTEXT_LENGTH)
        step = Step(len(state.steps), turn.tokens, turn.seconds)
        state.steps.append(step)
        state.messages.append(_assistant_message(turn))
        if turn.truncated is not None and not turn.parsed.calls:
            return _stop(state, StopReason(turn.truncated))
        if turn.parsed.malformed is not None:
            if repairs >= limits.max_repairs:
                return _stop(state, StopReason.MALFORMED)
            repairs += 1
            request = prompts.repair_request(turn.parsed.malformed.detail)
            state.messages.append({"role": "user", "content": request})
            await policy.user_message(request)
            continue
        repairs = 0
        if not turn.parsed.calls:
            return _stop(state, StopReason.ANSWER)
        results = [await _call(call, by_name, call_tool, step) for call in turn.parsed.calls]
        texts = [prompts.clip(text, limits.tool_result_characters) for text in results]
        if not state.warned and policy.context_left < limits.warn_below:
            state.warned = True
            texts[-1] += prompts.context_warning(policy.context_left)
        state.messages += [{"role": "tool", "content": text} for text in texts]
        await policy.tool_results(texts)
    return _stop(state, StopReason.MAX_TURNS)


def _stop(state: LoopState, reason: StopReason) -> StopReason:
    state.stop_reason = reason
    return reason


def _assistant_message(turn: ModelTurn) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": turn.parsed.content if turn.parsed.calls else turn.text,
    }
    if turn.parsed.calls:
        message["tool_calls"] = [{"name": c.name, "arguments": c.arguments} for c in turn.parsed.calls]
    return message


async def _call(call: ToolCall, by_name: Mapping[str, Tool], call_tool: CallTool, step: Step) -> str:
    started = time.monotonic()
    tool = by_name.get(call.name)
    if tool is None:
        result = ToolResult(f"Error: there is no tool {call.name!r}. Tools: {', '.join(sorted(by_name))}", ok=False)
    else:
        result = await call_tool(tool, call.arguments)
    step.tools.append(ToolStep(call.name, result.ok, time.monotonic() - started))
    return result.text
