"""The embedded engine against transformers: what it samples, and that batching and caches do not change it."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from serving import MAX_LEN, Served, serve

from deskrl.agent.model_files import load_chat_tokenizer


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Served]:
    with serve(tiny) as served:
        yield served


def _prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(10, 40_000), k=length)


def test_greedy_equals_transformers_generate(engine: Served) -> None:
    # Shorter than, as long as, and longer than a prefill chunk; more requests than rows.
    prompts = [_prompt(i, n) for i, n in enumerate([1, 3, 17, 64, 255, 256, 257, 600])]
    with ThreadPoolExecutor(8) as pool:
        choices = list(pool.map(lambda p: engine.complete(p, temperature=0, max_tokens=12), prompts))
    for prompt, choice in zip(prompts, choices, strict=True):
        with torch.inference_mode():
            out = engine.reference.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert choice["token_ids"] == out[0, len(prompt) :].tolist()
        assert choice["prompt_token_ids"] == prompt


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_are_those_of_a_full_forward(engine: Served, temperature: float) -> None:
    """Two turns of eight conversations at once: the second turn starts from the prefix cache."""
    rng = random.Random(int(temperature * 10))
    settings = {"temperature": temperature, "ignore_eos": True}

    def converse(seed: int) -> list[tuple[list[int], dict]]:
        first = _prompt(seed, 20 + 37 * (seed % 8))
        one = engine.complete(first, max_tokens=4 + seed % 8, seed=seed, **settings)
        second = first + one["token_ids"] + _prompt(seed + 1, 9)
        return [(first, one), (second, engine.complete(second, max_tokens=10, top_p=0.9, top_k=50, **settings))]

    with ThreadPoolExecutor(8) as pool:
        turns = [turn for pair in pool.map(converse, rng.sample(range(1000), 8)) for turn in pair]
    for prompt, choice in turns:
        expected = engine.logprobs(prompt + choice["token_ids"], temperature)[len(prompt) - 1 :]
        torch.testing.assert_close(torch.tensor(choice["logprobs"]["token_logprobs"]), expected, atol=2e-4, rtol=0)
    assert sum(choice["deskrl"]["cached_tokens"] > 0 for _, choice in turns[1::2]) == 8


def test_a_seed_draws_the_same_whatever_runs_beside(engine: Served) -> None:
    def draw(_: int = 0) -> list[int]:
        return engine.complete(_prompt(5, 30), max_tokens=16, seed=77)["token_ids"]

    alone = draw()
    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(engine.complete, _prompt(i, 40), max_tokens=30) for i in range(3)]
        together = list(pool.map(draw, range(3)))
        for other in others:
            other.result()
    assert together == [alone] * 3
    assert engine.complete(_prompt(5, 30), max_tokens=16, seed=78)["token_ids"] != alone


def test_sampling_follows_the_distribution(engine: Served) -> None:
    """top_k=3: only the three likeliest ids come, each about as often as it should."""
    prompt = _prompt(9, 12)
    with torch.inference_mode():
        top = engine.reference(input_ids=torch.tensor([prompt])).logits[0, -1].topk(3)
    reply = engine.post("/v1/completions", {"prompt": prompt, "n": 300, "max_tokens": 1, "top_k": 3, "seed": 0})
    drawn = [choice["token_ids"][0] for choice in reply.json()["choices"]]
    for token, p in zip(top.indices.tolist(), torch.softmax(top.values, -1).tolist(), strict=True):
        assert abs(drawn.count(token) / 300 - p) < 0.12  # four standard deviations
    assert set(drawn) == set(top.indices.tolist())


def test_stop_tokens_are_part_of_the_output(engine: Served) -> None:
    prompt = _prompt(3, 20)
    free = engine.complete(prompt, temperature=0, max_tokens=12)
    assert (free["finish_reason"], len(free["token_ids"])) == ("length", 12)
    stop = free["token_ids"][4]
    where = free["token_ids"].index(stop)
    stopped = engine.complete(prompt, temperature=0, max_tokens=12, stop_token_ids=[stop])
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)
    assert stopped["token_ids"] == free["token_ids"][: where + 1]
    later = engine.complete(prompt, temperature=0, max_tokens=12, min_tokens=where + 2, stop_token_ids=[stop])
    assert len(later["token_ids"]) >= where + 2


def test_eos_stops_unless_ignored(engine: Served) -> None:
    eos = engine.tokenizer.eos_token_id
    head = engine.scheduler.runner.model.lm_head.weight
    prompt = _prompt(4, 10)
    first = engine.complete(prompt, temperature=0, max_tokens=1)["token_ids"][0]
    kept = head.data[[eos, first]].clone()
    try:
        head.data[[eos, first]] = kept.flip(0)  # now eos is what the model says first
        assert engine.complete(prompt, temperature=0, max_tokens=5)["token_ids"] == [eos]
        assert len(engine.complete(prompt, temperature=0, max_tokens=5, ignore_eos=True)["token_ids"]) == 5
    finally:
        head.data[[eos, first]] = kept
        engine.post("/reset_prefix_cache")


def test_the_agent_reads_the_text_that_the_engine_wrote(engine: Served, tiny: Path) -> None:
    """The agent decodes ids with `tokenizers` alone, the engine with transformers."""
    tokenizer = load_chat_tokenizer(str(tiny))
    for seed in range(8):
        choice = engine.complete(_prompt(seed, 20), max_tokens=40, seed=seed)
        assert tokenizer.decode(choice["token_ids"], skip_special_tokens=True) == choice["text"]


def test_the_three_generation_endpoints_agree(engine: Served) -> None:
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    greedy = {"temperature": 0, "max_tokens": 6}
    chat = engine.post("/v1/chat/completions", {"model": "policy", "messages": messages, **greedy}).json()
    ids = chat["prompt_token_ids"]
    assert ids == engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    generated = engine.post("/inference/v1/generate", {"token_ids": ids, "sampling_params": greedy}).json()
    text = engine.tokenizer.decode(ids)
    completed = engine.post("/v1/completions", {"prompt": text, **greedy}).json()
    outputs = [reply["choices"][0]["token_ids"] for reply in (chat, generated, completed)]
    assert outputs[0] == outputs[1] == outputs[2]
    assert chat["usage"] == {"prompt_tokens": len(ids), "completion_tokens": 6, "total_tokens": len(ids) + 6}
    assert chat["choices"][0]["message"]["content"] == engine.tokenizer.decode(outputs[0], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"prompt": [5] * 700, "max_tokens": 69}, 400, f"This model's maximum context length is {MAX_LEN} tokens"),
        ({"prompt": [5], "stop": ["x"]}, 400, "`stop` is not supported"),
        ({"prompt": [5], "stream": True}, 400, "`stream` is not supported"),
        ({"prompt": [5], "top_p": 0}, 400, "top_p"),
        ({"prompt": [5], "max_tokens": "many"}, 400, "bad sampling parameter"),
        ({"prompt": [49152]}, 400, "out of vocabulary"),
        ({"prompt": []}, 400, "non-empty"),
        ({}, 400, "non-empty"),
        ({"prompt": [5], "model": "other"}, 404, "The model `other` does not exist"),
    ],
)
def test_what_cannot_be_served_is_refused(engine: Served, body: dict, status: int, text: str) -> None:
    reply = engine.post("/v1/completions", body)
    assert reply.status_code == status
    assert text in reply.json()["error"]["message"]


def test_the_last_position_can_be_used(engine: Served) -> None:
    assert len(engine.complete([5] * 700, max_tokens=68, ignore_eos=True)["token_ids"]) == 68


def test_a_body_that_is_not_json(engine: Served) -> None:
    reply = httpx.post(f"{engine.url}/v1/completions", content=b"{")
    assert reply.status_code == 400
    assert "not JSON" in reply.text
