"""Tokens per second of the embedded engine against sequential transformers `generate`, in one run.

    python benchmarks/embedded_engine.py [--model tiny] [--requests 32] [--tokens 64]

Prints one JSON line. The engine runs as users run it, a process behind HTTP, with as many threads and the
same dtype as `generate`; prompts are random ids, all different, so that the prefix cache has no part.
`ratio` is the engine's rate over that of `generate`, at each number of concurrent requests.
"""

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from pathlib import Path

import httpx

from deskrl.training.cpu.launch import EngineProcess
from deskrl.training.models import prepare_model

CONCURRENCY = (1, 4, 16)


def _prompts(seed: int, count: int, length: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(10, 40_000), k=length) for _ in range(count)]


async def _engine_rate(url: str, prompts: list[list[int]], tokens: int, concurrency: int) -> float:
    slots = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(timeout=600, trust_env=False) as client:

        async def one(prompt: list[int]) -> int:
            body = {"token_ids": prompt, "sampling_params": {"max_tokens": tokens, "ignore_eos": True}}
            async with slots:
                reply = (await client.post(f"{url}/inference/v1/generate", json=body)).raise_for_status()
            return len(reply.json()["choices"][0]["token_ids"])

        start = time.perf_counter()
        return sum(await asyncio.gather(*map(one, prompts))) / (time.perf_counter() - start)


def _generate_rate(model_dir: Path, prompts: list[list[int]], tokens: int, threads: int) -> float:
    import torch
    from transformers import AutoModelForCausalLM

    from deskrl.training.cpu.runner import default_dtype

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=default_dtype()).eval()
    settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": True, "top_k": 0}
    with torch.inference_mode():
        model.generate(torch.tensor([prompts[0]]), **settings)
        start = time.perf_counter()
        count = sum(model.generate(torch.tensor([p]), **settings).shape[1] - len(p) for p in prompts)
        return count / (time.perf_counter() - start)


def _memory_mb(pid: int | None) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024


def main() -> None:
    """Measure and print."""
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # as the engine runs; read when torch is loaded
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    model_dir = prepare_model(args.model)
    baseline = _generate_rate(
        model_dir, _prompts(0, max(2, args.requests // 4), args.prompt), args.tokens, args.threads
    )
    rates = {}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "engine.log"
        length = args.prompt + args.tokens
        started = time.perf_counter()
        with EngineProcess(
            "embedded", model_dir, "m", log_path=log, max_model_len=length, threads=args.threads
        ) as engine:
            start_s = time.perf_counter() - started
            asyncio.run(_engine_rate(engine.base_url, _prompts(1, 2, args.prompt), args.tokens, 2))
            for concurrency in CONCURRENCY:
                count = max(concurrency, args.requests * concurrency // max(CONCURRENCY))
                prompts = _prompts(1 + concurrency, count, args.prompt)
                rates[concurrency] = asyncio.run(_engine_rate(engine.base_url, prompts, args.tokens, concurrency))
            memory = _memory_mb(engine.pid)
    print(
        json.dumps(
            {
                "benchmark": "embedded_engine",
                "model": args.model,
                "engine_tokens_per_s": {str(c): round(r, 1) for c, r in rates.items()},
                "generate_tokens_per_s": round(baseline, 1),
                "ratio": {str(c): round(r / baseline, 2) for c, r in rates.items()},
                "engine_start_s": round(start_s, 1),
                "engine_peak_rss_mb": memory,
            }
        )
    )


if __name__ == "__main__":
    main()
