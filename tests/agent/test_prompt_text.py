"""The history on the wire: encoded once, whole at the server; its repetition in an answer is never parsed."""

from __future__ import annotations

from array import array

from agent_servers import completions, sampled

from deskrl.agent.engine import CompletionsEngine


async def test_the_server_gets_every_prompt_whole() -> None:
    long = list(range(20_000))
    prompts = [[], [1], [1, 2, 3], [1, 2, 3], [1, 2], [1, 9, 3], long, [*long, 7], [4]]
    async with completions(*(sampled([9]) for _ in range(2 * len(prompts)))) as server:
        one = CompletionsEngine(server.base_url, "m", timeout_s=20, retry_s=5)
        for prompt in prompts:
            # A list, as anyone may pass it, and the ledger's own form.
            for ids in (prompt, array("i", prompt)):
                await one.generate(ids, max_tokens=1, stop_token_ids=[9], sampling={"prompt": [0]}, session_id="s")
    assert [body["prompt"] for body in server.bodies] == [prompt for prompt in prompts for _ in range(2)]


async def test_a_repeated_prompt_in_the_answer_changes_nothing() -> None:
    answer = sampled([5, 9])
    choice = answer["choices"][0]
    text = 'it says "prompt_token_ids":[1] ]'
    answer["choices"] = [{"text": text, "prompt_token_ids": [1, 2], **choice, "more": [3]}]
    async with completions(answer) as server:
        engine = CompletionsEngine(server.base_url, "m", timeout_s=20, retry_s=5)
        generation = await engine.generate([1, 2], max_tokens=2, stop_token_ids=[9], sampling={}, session_id="s")
    assert (generation.ids, generation.logprobs) == ([5, 9], choice["logprobs"]["token_logprobs"])
