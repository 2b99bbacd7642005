"""The completions client against real HTTP: what is sent, what is retried, what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agent_servers import Scripted, completions, free_port, sampled, serve

from deskrl.agent import engine as engine_module
from deskrl.agent.engine import CompletionsEngine, Generation, register_weight_version
from deskrl.agent.errors import ContextOverflowError, EngineProtocolError, EngineUnavailableError


async def generate(base_url: str, retry_s: float = 20, timeout_s: float = 20, **sampling: Any) -> Generation:
    engine = CompletionsEngine(base_url + "/", "m", timeout_s=timeout_s, retry_s=retry_s)
    return await engine.generate([1, 2], max_tokens=7, stop_token_ids=[9], sampling=sampling, session_id="trial-1")


async def test_ids_go_out_and_come_back() -> None:
    async with completions(sampled([5, 9])) as server:
        generation = await generate(server.base_url, temperature=0.5, model="other", max_tokens=1)
    assert (generation.ids, generation.logprobs, generation.finish_reason) == ([5, 9], [-0.5, -1.5], "stop")
    assert generation.weight_version_start is None and generation.weight_version_end is None
    # Sampling parameters cannot displace what the ledger depends on.
    assert server.bodies == [
        {
            "temperature": 0.5,
            "model": "m",
            "prompt": [1, 2],
            "max_tokens": 7,
            "stop_token_ids": [9],
            "logprobs": 1,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
    ]
    assert server.headers[0]["x-session-id"] == "trial-1"


@pytest.mark.parametrize("status", [500, 503, 429, 408])
async def test_passing_failures_are_retried(status: int) -> None:
    async with completions((status, "busy"), sampled([9])) as server:
        assert (await generate(server.base_url)).ids == [9]
    assert server.bodies[0] == server.bodies[1]


async def test_an_engine_that_is_not_up_yet_is_waited_for() -> None:
    port = free_port()
    waiting = asyncio.create_task(generate(f"http://127.0.0.1:{port}"))
    await asyncio.sleep(0.1)
    async with serve("/v1/completions", Scripted([sampled([9])]).answer, port):
        assert (await waiting).ids == [9]


async def test_retries_end() -> None:
    with pytest.raises(EngineUnavailableError, match=r"failed for 0.1 s: ConnectError"):
        await generate(f"http://127.0.0.1:{free_port()}", retry_s=0.1)
    async with completions((500, "no memory")) as server:
        with pytest.raises(EngineUnavailableError, match="HTTP 500: no memory"):
            await generate(server.base_url, retry_s=0.1)


async def test_a_silent_engine_times_out() -> None:
    async def silence(body: Any) -> Any:
        await asyncio.sleep(60)

    async with completions(silence) as server:
        with pytest.raises(EngineUnavailableError, match=r"no answer in 0.2 s \(ReadTimeout\)"):
            await generate(server.base_url, timeout_s=0.2)
    # It may still be at work: the same request is not sent twice.
    assert len(server.bodies) == 1


async def test_a_prompt_that_is_too_long() -> None:
    message = "This model's maximum context length is 4 tokens. However, you requested 9 tokens"
    async with completions((400, message)) as server:
        with pytest.raises(ContextOverflowError, match="maximum context length is 4"):
            await generate(server.base_url)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((400, "bad stop_token_ids"), "HTTP 400: bad stop_token_ids"),
        ((404, "no such model"), "HTTP 404"),
        ((200, "<html>"), "not a JSON object"),
        ((200, "[1]"), "not a JSON object"),
        ({}, "completion without 'choices'"),
        ({"choices": []}, "completion without"),
        ({"choices": [{"text": "a", "logprobs": None, "finish_reason": "stop"}]}, "without 'token_ids'"),
        ({"choices": [{"token_ids": [1], "logprobs": None, "finish_reason": "stop"}]}, "without token_ids or logprobs"),
        (
            {"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [-1, -2]}, "finish_reason": "stop"}]},
            "1 token ids but 2 logprobs",
        ),
        (
            {"choices": [{"token_ids": [1, 2], "logprobs": {"token_logprobs": [-1, None]}, "finish_reason": "stop"}]},
            "logprob 1 of 2 is None",
        ),
    ],
)
async def test_answers_that_cannot_train_are_refused(reply: Any, message: str) -> None:
    async with completions(reply) as server:
        with pytest.raises(EngineProtocolError, match=message):
            await generate(server.base_url)


async def test_an_aborted_generation_is_no_turn() -> None:
    async with completions(sampled([1], "abort")) as server:
        with pytest.raises(EngineUnavailableError, match="finish_reason 'abort'"):
            await generate(server.base_url)


async def test_weight_versions_are_recorded_and_salt_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_weight_versions", {})
    version = 3

    async def synced_during(body: Any) -> Any:
        nonlocal version
        version += 1
        return sampled([9])

    async def synced_then_failed(body: Any) -> Any:
        nonlocal version
        version += 1
        return (503, "syncing")

    reported = sampled([9], deskrl={"weight_version_start": 70, "weight_version_end": 71})
    async with completions(synced_during, synced_then_failed, sampled([9]), reported) as server:
        register_weight_version(server.base_url + "/", lambda: version)
        first, second, third = [await generate(server.base_url) for _ in range(3)]
    assert (first.weight_version_start, first.weight_version_end) == (3, 4)
    # The attempt that counts started after the sync, and must not read a cache from before it.
    assert (second.weight_version_start, second.weight_version_end) == (5, 5)
    assert [body["cache_salt"] for body in server.bodies] == ["weights-3", "weights-4", "weights-5", "weights-5"]
    # An engine that knows better is believed.
    assert (third.weight_version_start, third.weight_version_end) == (70, 71)
