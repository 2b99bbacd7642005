"""Pausing, reloading weights, forgetting prefixes and giving up, all while requests run."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file
from serving import Served, serve
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = list(range(100, 140))


@pytest.fixture
def engine(tiny: Path) -> Iterator[Served]:
    with serve(tiny) as served:
        yield served


@pytest.fixture(scope="module")
def other(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with other weights of the same shape, and the model that has them."""
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    folder = tmp_path_factory.mktemp("weights")
    save_file({k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}, folder / "model.safetensors")
    return folder, model


def _until(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("the condition was never met")


def _reload(engine: Served, folder: Path) -> httpx.Response:
    return engine.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})


def _start(engine: Served, pool: ThreadPoolExecutor, tokens: int = 200) -> "Future[dict[str, Any]]":
    """A long greedy request that is known to be running when this returns."""
    future = pool.submit(engine.complete, PROMPT, temperature=0, max_tokens=tokens, ignore_eos=True)
    _until(lambda: any(len(s.output) > 3 for s in list(engine.scheduler._running)))
    return future


def _sampled(engine: Served) -> int:
    return sum(len(s.output) for s in engine.scheduler._running)


def test_keep_freezes_and_reload_swaps_under_a_running_request(engine: Served, other: tuple[Path, Any]) -> None:
    folder, model = other
    with ThreadPoolExecutor(2) as pool:
        expected = engine.complete(PROMPT, temperature=0, max_tokens=200, ignore_eos=True)["token_ids"]
        running = _start(engine, pool)
        assert engine.post("/pause", mode="keep", clear_cache="false").status_code == 200
        frozen = _sampled(engine)
        queued = pool.submit(engine.complete, PROMPT[:9], temperature=0, max_tokens=5)
        _until(lambda: engine.scheduler.load()["waiting"] == 1)
        assert not running.done()
        assert _sampled(engine) == frozen
        assert _reload(engine, folder).json()["deskrl"] == {"weight_version": 1}
        engine.post("/reset_prefix_cache", {"reset_running_requests": True})
        assert engine.scheduler.load() == {"running": 0, "waiting": 2, "weight_version": 1}
        engine.post("/resume")
        choice, late = running.result(), queued.result()
    ids = choice["token_ids"]
    assert choice["deskrl"]["weight_version_start"] == 0
    assert choice["deskrl"]["weight_version_end"] == 1
    assert len(ids) == 200
    assert ids[:frozen] == expected[:frozen]
    assert ids != expected
    # What came before the reload has the old weights' log-probabilities, the rest the new ones'.
    logprobs = torch.tensor(choice["logprobs"]["token_logprobs"])
    start = len(PROMPT) - 1
    old, new = engine.logprobs(PROMPT + ids)[start:], engine.logprobs(PROMPT + ids, model=model)[start:]
    torch.testing.assert_close(logprobs[:frozen], old[:frozen], atol=2e-4, rtol=0)
    torch.testing.assert_close(logprobs[frozen:], new[frozen:], atol=2e-4, rtol=0)
    assert late["deskrl"]["weight_version_start"] == 1


def test_without_recompute_a_stale_prefix_is_never_shared(engine: Served, other: tuple[Path, Any]) -> None:
    folder, model = other
    with ThreadPoolExecutor(2) as pool:
        running = _start(engine, pool)
        engine.post("/pause", mode="keep")
        _reload(engine, folder)
        engine.post("/resume")
        beside = engine.complete(PROMPT, temperature=0, max_tokens=8)  # could copy the running one's keys
        running.result()
    after = engine.complete(PROMPT, temperature=0, max_tokens=8)  # could copy the finished one's
    with torch.inference_mode():
        out = model.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)[0, len(PROMPT) :].tolist()
    assert beside["token_ids"] == after["token_ids"] == out
    assert beside["deskrl"]["cached_tokens"] == 0


def test_weights_that_do_not_fit_change_nothing(engine: Served, other: tuple[Path, Any], tmp_path: Path) -> None:
    before = engine.complete(PROMPT, temperature=0, max_tokens=8)
    weights = {k: v for k, v in other[1].state_dict().items() if k != "lm_head.weight"}
    weights["model.norm.weight"] = torch.zeros(3)
    save_file(weights, tmp_path / "model.safetensors")
    reply = _reload(engine, tmp_path)
    assert reply.status_code == 400
    assert "model.norm.weight" in reply.json()["error"]["message"]
    assert _reload(engine, tmp_path / "absent").status_code == 400
    after = engine.complete(PROMPT, temperature=0, max_tokens=8)
    assert after["token_ids"] == before["token_ids"]
    assert after["deskrl"]["weight_version_end"] == 0
    assert engine.post("/collective_rpc", {"method": "shutdown"}).status_code == 400


def test_reset_prefix_cache_forgets(engine: Served) -> None:
    engine.complete(PROMPT, max_tokens=2)
    assert engine.complete(PROMPT, max_tokens=2)["deskrl"]["cached_tokens"] == len(PROMPT) - 1
    engine.post("/reset_prefix_cache")
    assert engine.complete(PROMPT, max_tokens=2)["deskrl"]["cached_tokens"] == 0


def test_abort_returns_what_there_is_and_wait_lets_finish(engine: Served) -> None:
    with ThreadPoolExecutor(2) as pool:
        running = _start(engine, pool)
        engine.post("/pause")
        aborted = running.result()
        assert aborted["finish_reason"] == "abort"
        assert 3 < len(aborted["token_ids"]) < 200
        engine.post("/resume")
        running = _start(engine, pool, tokens=60)
        engine.post("/pause", mode="wait")
        assert len(running.result()["token_ids"]) == 60
        queued = pool.submit(engine.complete, PROMPT, max_tokens=2)
        _until(lambda: engine.scheduler.load()["waiting"] == 1)
        engine.post("/resume")
        assert queued.result()["finish_reason"] == "length"
    assert engine.post("/pause", mode="never").status_code == 400


@pytest.mark.parametrize("paused", [False, True])
def test_a_client_that_leaves_frees_its_row(engine: Served, paused: bool) -> None:
    body = {"prompt": PROMPT, "max_tokens": 700, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        kept = _start(engine, pool, tokens=200)
        if paused:
            engine.post("/pause", mode="keep")
        with httpx.Client() as client, pytest.raises(httpx.ReadTimeout):
            client.post(f"{engine.url}/v1/completions", json=body, timeout=httpx.Timeout(30, read=0.5))
        _until(lambda: len(engine.scheduler._running) + len(engine.scheduler._waiting) <= 1)
        engine.post("/resume")
        ids = kept.result()["token_ids"]
    assert ids == engine.complete(PROMPT, temperature=0, max_tokens=200, ignore_eos=True)["token_ids"]


async def test_skyrls_own_client(engine: Served, other: tuple[Path, Any], tiny: Path) -> None:
    """The calls SkyRL's trainer makes, by its own client, and the weight sync of the CPU workers."""
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

    from deskrl.training.cpu import shim
    from deskrl.training.cpu.workers import send_weights

    client = RemoteInferenceClient(
        proxy_url=engine.url,
        server_urls=[engine.url],
        data_parallel_size=1,
        model_name="policy",
        tokenizer=AutoTokenizer.from_pretrained(tiny),
    )
    async with client:
        assert (await client.get_world_size())[0] == 1
        sampling = {"temperature": 0.0, "max_tokens": 6, "logprobs": 1, "stop": None, "min_p": 0.0, "top_k": -1}
        batch: Any = {"prompt_token_ids": [PROMPT, PROMPT[:7]], "sampling_params": sampling, "session_ids": ["a", "b"]}
        before = await client.generate(batch)
        assert [len(ids) for ids in before["response_ids"]] == [6, 6]
        assert before["response_logprobs"] is not None and len(before["response_logprobs"][0]) == 6
        assert before["stop_reasons"] == ["length", "length"]
        assert before["responses"][0] == engine.tokenizer.decode(before["response_ids"][0])
        await client.pause_generation()
        weights = {k: v for k, v in other[1].state_dict().items() if k != "lm_head.weight"}
        await send_weights(weights, tiny, client, recompute_running=True)
        await client.resume_generation()
        assert not shim.weights_folder().exists()
        after = await client.generate(batch)
        assert after["response_ids"] != before["response_ids"]
        with torch.inference_mode():
            out = other[1].generate(torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False)
        assert after["response_ids"][0] == out[0, len(PROMPT) :].tolist()
        await client.reset_prefix_cache()
        await client.finish_session("a")
