"""Real HTTP servers with scripted answers, in the test's own event loop, and a real world gateway."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from deskrl.sandbox.endpoint import WorldEndpoint
from deskrl.tokens import ChatTokenizer


@dataclass
class Scripted:
    """Answers each POST with the next of `replies`: an object (200), or a status and a text, or a coroutine."""

    replies: list[Any]
    base_url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    async def answer(self, request: Request) -> Response:
        self.bodies.append(json.loads(await request.body()))
        self.headers.append(dict(request.headers))
        reply = self.replies.pop(0) if self.replies else (418, "the script is over")
        if callable(reply):
            reply = await reply(self.bodies[-1])
        if isinstance(reply, tuple):
            return PlainTextResponse(reply[1], status_code=reply[0])
        return JSONResponse(reply)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def serve(path: str, handler: Callable[[Request], Any], port: int | None = None) -> AsyncIterator[str]:
    """Serves POST `path` and yields the address."""
    port = port or free_port()
    app = Starlette(routes=[Route(path, handler, methods=["POST"])])
    config = uvicorn.Config(app, port=port, log_config=None, lifespan="off", timeout_graceful_shutdown=0)
    server = uvicorn.Server(config)
    # pytest keeps its own signal handlers: only the serving part runs.
    task = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = server.force_exit = True
        await task


@asynccontextmanager
async def completions(*replies: Any) -> AsyncIterator[Scripted]:
    """An engine's /v1/completions."""
    script = Scripted(list(replies))
    async with serve("/v1/completions", script.answer) as script.base_url:
        yield script


def sampled(ids: list[int], finish_reason: str = "stop", **more: Any) -> dict[str, Any]:
    """A completion as vLLM sends it with `return_token_ids`."""
    logprobs = {"token_logprobs": [-0.5 - n for n in range(len(ids))]}
    return {"choices": [{"token_ids": ids, "logprobs": logprobs, "finish_reason": finish_reason, "text": ""}], **more}


def spoken(tokenizer: ChatTokenizer, text: str, finish_reason: str = "stop") -> dict[str, Any]:
    """A completion of `text`, with the end of the turn if the model stopped by itself."""
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    return sampled(tokenizer.encode_content(text) + [end] * (finish_reason == "stop"), finish_reason)


@dataclass(frozen=True)
class Gateway:
    """A real gateway process over a copy of the sample world."""

    process: subprocess.Popen[bytes]
    endpoint: WorldEndpoint
    filesystem: Path


@contextmanager
def gateway(pristine: Path) -> Iterator[Gateway]:
    # Unix socket paths are limited to 107 bytes; pytest's own temporary paths can be longer.
    with tempfile.TemporaryDirectory(prefix="ag", dir="/tmp") as folder:
        world = shutil.copytree(pristine, Path(folder) / "world")
        command = [sys.executable, "-I", "-m", "deskrl.worlds.gateway", "--filesystem", world / "filesystem"]
        command += ["--apps-data", world / "apps_data", "--config", world / "app/tools/mcp.json"]
        process = subprocess.Popen([*command, "--uds", Path(folder) / "s"], stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert b"listening on" in line, line
            with httpx.Client(
                transport=httpx.HTTPTransport(uds=f"{folder}/s", retries=5), base_url="http://world", timeout=60
            ) as client:
                assert client.get("/health").text == "OK"
            yield Gateway(process, WorldEndpoint("http://world", f"{folder}/s"), world / "filesystem")
        finally:
            process.kill()
            process.communicate()
