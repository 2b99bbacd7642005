"""Real gateway processes over a world directory, and how tests talk to them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client


@asynccontextmanager
async def mcp_session(http: httpx.AsyncClient, base_url: str) -> AsyncIterator[ClientSession]:
    """A session of the public MCP client over `http`."""
    async with (
        streamable_http_client(base_url + "/mcp/", http_client=http) as streams,
        ClientSession(streams[0], streams[1]) as session,
    ):
        await session.initialize()
        yield session


@dataclass(frozen=True)
class Gateway:
    """A serving world: where it listens and which directories it serves."""

    process: subprocess.Popen[str]
    world: Path
    base_url: str
    uds: str | None

    @property
    def filesystem(self) -> Path:
        return self.world / "filesystem"

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=self.uds), base_url=self.base_url, timeout=60)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[ClientSession]:
        """A session of the public MCP client."""
        async with self.http() as http, mcp_session(http, self.base_url) as session:
            yield session

    async def call(self, tool: str, **arguments: Any) -> str:
        """The text of a call that must succeed."""
        ok, text = await self.outcome(tool, **arguments)
        assert ok, text
        return text

    async def outcome(self, tool: str, **arguments: Any) -> tuple[bool, str]:
        """Whether a call succeeded, and its text."""
        async with self.session() as session:
            result = await session.call_tool(tool, arguments)
        return not result.isError, "".join(part.text for part in result.content if part.type == "text")


def command(world: Path, *address: str) -> list[str]:
    """The command that start.sh runs, over `world` instead of the sandbox's paths."""
    gateway = [sys.executable, "-I", "-m", "deskrl.worlds.gateway", "--filesystem", str(world / "filesystem")]
    gateway += ["--apps-data", str(world / "apps_data"), "--config", str(world / "app/tools/mcp.json")]
    return [*gateway, *address]


def start(world: Path, kind: str, run: Path) -> Gateway:
    """Start a gateway on a Unix socket (`uds`) or a free port (`tcp`) and wait until it is healthy."""
    socket = run / "s"
    address = ["--uds", str(socket)] if kind == "uds" else ["--port", "0"]
    log = run / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command(world, *address), stdout=output, stderr=output, text=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        text = log.read_text()
        if "listening on" in text:
            port = text.split("listening on ('127.0.0.1', ")[1].split(")")[0] if kind == "tcp" else ""
            gateway = Gateway(
                process,
                world,
                f"http://127.0.0.1:{port}" if port else "http://world",
                str(socket) if kind == "uds" else None,
            )
            try:
                transport = httpx.HTTPTransport(uds=gateway.uds)
                with httpx.Client(transport=transport, base_url=gateway.base_url, timeout=60) as client:
                    if client.get("/health").text == "OK":
                        return gateway
            except httpx.TransportError:
                pass
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"the gateway did not start:\n{log.read_text()}")
