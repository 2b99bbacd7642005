"""The engine's real server on a thread of the test process, next to the reference it is compared with."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn
from transformers import AutoModelForCausalLM, AutoTokenizer

from deskrl.training.cpu.engine import Engine
from deskrl.training.cpu.runner import Runner
from deskrl.training.cpu.scheduler import Scheduler

MAX_LEN = 768


@dataclass(frozen=True)
class Served:
    """A running engine, its scheduler for looking inside, and the same weights in transformers."""

    url: str
    scheduler: Scheduler
    reference: Any
    tokenizer: Any

    def post(self, path: str, body: dict[str, Any] | None = None, **params: str) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body or {}, params=params, timeout=120)

    def complete(self, prompt: list[int], **body: Any) -> dict[str, Any]:
        reply = self.post("/v1/completions", {"prompt": prompt, **body})
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0] | {"deskrl": reply.json()["deskrl"]}

    def logprobs(self, ids: list[int], temperature: float = 1.0, model: Any = None) -> torch.Tensor:
        """(len(ids) - 1) log-probabilities of ids[1:], by one full forward of the reference."""
        with torch.inference_mode():
            logits = (model or self.reference)(input_ids=torch.tensor([ids])).logits[0, :-1].float()
        every = torch.log_softmax(logits / temperature, -1)
        return every.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


@contextmanager
def serve(model: Path, max_batch: int = 6) -> Iterator[Served]:
    """In float32, so that batched and single computations agree to rounding."""
    torch.set_num_threads(1)  # the models are tiny, and more threads only fight each other
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    scheduler = Scheduler(Runner(str(model), max_batch, MAX_LEN, dtype=torch.float32), max_batch, 64 * 2**20)
    app = Engine(scheduler, tokenizer, "policy", MAX_LEN).app()
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Served(f"http://127.0.0.1:{port}", scheduler, reference, tokenizer)
    finally:
        scheduler.stop()
        server.should_exit = True
        thread.join()
