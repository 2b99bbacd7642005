"""A `/v1/completions` server for tests that says what it is told to, token by token, with made-up logprobs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from deskrl.agent.model_files import load_chat_tokenizer

Script = Callable[[str], str]
"""From the text of the prompt so far to the model's next turn, without the end-of-turn token."""


class ScriptedEngine:
    """Serves `script` with the tokenizer of `model_dir`; counts requests; can fail on purpose."""

    def __init__(self, model_dir: Path, script: Script) -> None:
        self.script = script
        self.requests: list[dict[str, Any]] = []
        self.status = 200
        self.delay_s = 0.0
        self.answer_with: dict[str, Any] = {}
        self._tokenizer = load_chat_tokenizer(str(model_dir))
        self._end = self._tokenizer.token_id("<|im_end|>")

    async def completions(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.requests.append(body)
        await asyncio.sleep(self.delay_s)
        if self.status != 200:
            return JSONResponse({"error": {"message": "on purpose"}}, self.status)
        text = self.script(self._tokenizer.decode(body["prompt"], skip_special_tokens=False))
        ids = [*self._tokenizer.encode_content(text), self._end]
        reason = "stop"
        if len(ids) > body["max_tokens"]:
            ids, reason = ids[: body["max_tokens"]], "length"
        logprobs = [-0.01 * (i + 1) for i in range(len(ids))]
        choice = {"index": 0, "token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason}
        versions = {"weight_version_start": 3, "weight_version_end": 3}
        return JSONResponse({"choices": [{**choice, **self.answer_with}], "deskrl": versions})


@contextlib.contextmanager
def serving(engine: ScriptedEngine) -> Iterator[str]:
    """Yields the address while the engine is served from a thread."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    app = Starlette(routes=[Route("/v1/completions", engine.completions, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
