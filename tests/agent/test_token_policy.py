"""The token policy over a real engine address: every token is accounted for, however a turn ended."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from agent_servers import Scripted, completions, sampled, spoken

from deskrl.agent.engine import CompletionsEngine
from deskrl.agent.errors import ContextOverflowError
from deskrl.agent.policy import TokenLimits, TokenPolicy
from deskrl.tokens import ChatMLRenderer, ChatTokenizer, SpanKind, ToolCall

START = [{"role": "system", "content": "S"}, {"role": "user", "content": "q"}]
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@asynccontextmanager
async def policy_over(
    tokenizer: ChatTokenizer, *replies: Any, limits: TokenLimits | None = None
) -> AsyncIterator[tuple[TokenPolicy, Scripted]]:
    async with completions(*replies) as server:
        policy = TokenPolicy(
            CompletionsEngine(server.base_url, "m", timeout_s=20, retry_s=5),
            ChatMLRenderer(tokenizer),
            limits or TokenLimits(max_context=1000, max_turn=100),
            sampling={"temperature": 1},
            session_id="s",
        )
        await policy.start(START, [])
        yield policy, server


async def test_the_prefix_holds_every_earlier_completion(tokenizer: ChatTokenizer) -> None:
    replies = [spoken(tokenizer, f"{n} {CALL}") for n in range(3)]
    async with policy_over(tokenizer, *replies, spoken(tokenizer, "Done.")) as (policy, server):
        for n in range(3):
            turn = await policy.turn()
            assert turn is not None and turn.parsed.calls == (ToolCall("f", {}),) and turn.text == f"{n} {CALL}"
            await policy.tool_results([f"result {n} <|im_end|>"])
        await policy.turn()
    prompts = [body["prompt"] for body in server.bodies]
    for n, (before, after) in enumerate(pairwise(prompts)):
        ids = replies[n]["choices"][0]["token_ids"]
        assert after[: len(before) + len(ids)] == before + ids
    ledger = policy.ledger
    kinds = [SpanKind.GENERATION, SpanKind.CLOSE, SpanKind.OBSERVATION]
    assert [s.kind for s in ledger.spans] == [SpanKind.PROMPT, *kinds * 3, *kinds[:2]]
    sampled_ids = [i for i, mask in zip(ledger.ids, ledger.loss_mask, strict=True) if mask]
    assert sampled_ids == [
        i for reply in [*replies, spoken(tokenizer, "Done.")] for i in reply["choices"][0]["token_ids"]
    ]
    assert server.bodies[0]["stop_token_ids"] == ChatMLRenderer(tokenizer).stop_token_ids


@pytest.mark.parametrize(
    ("room", "reason"), [(TokenLimits(1000, 9), "length"), (TokenLimits(20, 100), "context_length")]
)
async def test_a_cut_turn_is_closed_untrained(tokenizer: ChatTokenizer, room: TokenLimits, reason: str) -> None:
    async with policy_over(tokenizer, spoken(tokenizer, CALL, "length"), limits=room) as (policy, server):
        prompt = len(policy.ledger)
        turn = await policy.turn()
    assert turn is not None and turn.truncated == reason and turn.parsed.calls
    assert server.bodies[0]["max_tokens"] == min(room.max_context - prompt, room.max_turn)
    closed = policy.ledger.spans[-1]
    assert tokenizer.decode(policy.ledger.ids[closed.start :]) == "<|im_end|>\n"
    assert policy.ledger.loss_mask[closed.start :] == [0, 0]


async def test_an_empty_completion_invents_nothing(tokenizer: ChatTokenizer) -> None:
    async with policy_over(tokenizer, sampled([])) as (policy, _):
        turn = await policy.turn()
    assert turn is not None and turn.text == "" and turn.tokens == 0 and turn.parsed.calls == ()
    assert policy.ledger.sampled == 0 and policy.ledger.training_split()[1:] == ([], [], [])


async def test_a_full_context_asks_for_nothing(tokenizer: ChatTokenizer) -> None:
    async with policy_over(tokenizer, limits=TokenLimits(5, 5)) as (policy, server):
        assert len(policy.ledger) > 5 and policy.context_left == 0.0
        assert await policy.turn() is None
    assert server.bodies == []


async def test_an_overflow_leaves_the_ledger_whole(tokenizer: ChatTokenizer) -> None:
    async with policy_over(tokenizer, (400, "the maximum context length is 5")) as (policy, _):
        before = policy.ledger.to_bytes()
        with pytest.raises(ContextOverflowError):
            await policy.turn()
        assert policy.ledger.to_bytes() == before


async def test_a_repair_request_is_injected(tokenizer: ChatTokenizer) -> None:
    async with policy_over(tokenizer, spoken(tokenizer, "<tool_call>{")) as (policy, _):
        turn = await policy.turn()
        assert turn is not None and turn.parsed.malformed is not None
        await policy.user_message("Again.")
    span = policy.ledger.spans[-1]
    assert span.kind is SpanKind.INJECTED and not any(policy.ledger.loss_mask[span.start :])
    text = tokenizer.decode(policy.ledger.ids[span.start :])
    assert text == "<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n"
