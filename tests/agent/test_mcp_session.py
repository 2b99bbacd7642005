"""MCP sessions with the real gateway, and with servers that misbehave as real worlds do."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from agent_servers import Gateway, free_port, gateway, serve
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from deskrl.agent.catalogue import make_tool
from deskrl.agent.errors import WorldLostError
from deskrl.agent.mcp_session import WorldSession, open_world
from deskrl.sandbox.endpoint import WorldEndpoint


@pytest.fixture(scope="module")
def world(pristine: Path) -> Iterator[Gateway]:
    with gateway(pristine) as started:
        yield started


async def test_the_worlds_tools_work(world: Gateway) -> None:
    async with open_world(world.endpoint, call_timeout_s=60) as session:
        tools = {tool.name: tool for tool in await session.tools()}
        assert {"filesystem_read_text_file", "excel_read_tab", "mail_search_mail"} <= set(tools)
        notes = await session.call(tools["filesystem_read_text_file"], {"file_path": "/team/notes.md"})
        assert notes.ok and notes.text == (world.filesystem / "team/notes.md").read_text()
        # A tool's own error, and arguments it does not take, are text for the model.
        for arguments in ({"file_path": "/absent"}, {"no": "such"}, {"file_path": 3}):
            failed = await session.call(tools["filesystem_read_text_file"], arguments)
            assert not failed.ok and failed.text
        # Rows written as a JSON string are sent as rows.
        made = await session.call(
            tools["excel_create_spreadsheet"], {"file_path": "/new.xlsx", "rows": json.dumps([["a", 1]])}
        )
        assert made.ok, made.text
        unknown = await session.call(make_tool("no_such_tool", "", {}), {})
        assert not unknown.ok and "no_such_tool" in unknown.text


async def test_sessions_share_a_gateway(world: Gateway) -> None:
    async def names() -> set[str]:
        async with open_world(world.endpoint, call_timeout_s=60) as session:
            return {tool.name for tool in await session.tools()}

    first, second = await asyncio.gather(names(), names())
    assert first == second


async def test_an_exception_of_the_caller_keeps_its_class(world: Gateway) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with open_world(world.endpoint, call_timeout_s=60):
            raise KeyError("mine")


async def test_a_cancelled_session_is_a_cancellation(world: Gateway) -> None:
    entered = asyncio.Event()

    async def hold() -> None:
        async with open_world(world.endpoint, call_timeout_s=60):
            entered.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(hold())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_no_gateway_at_all() -> None:
    with pytest.raises(WorldLostError, match="ConnectError"):
        async with open_world(WorldEndpoint(f"http://127.0.0.1:{free_port()}"), call_timeout_s=5):
            pass


async def test_a_gateway_that_dies_during_a_call(pristine: Path) -> None:
    with gateway(pristine) as dying:
        with pytest.raises(WorldLostError):
            async with open_world(dying.endpoint, call_timeout_s=60) as session:
                tool = next(t for t in await session.tools() if t.name == "filesystem_list_files")
                assert (await session.call(tool, {"path": "/"})).ok
                # Stopped, it takes the request and never answers; killed, it drops the connection.
                os.kill(dying.process.pid, signal.SIGSTOP)
                call = asyncio.create_task(session.call(tool, {"path": "/"}))
                await asyncio.sleep(0.2)
                assert not call.done()
                dying.process.kill()
                await call
        with pytest.raises(WorldLostError):
            async with open_world(dying.endpoint, call_timeout_s=5):
                pass


@asynccontextmanager
async def misbehaving(results: list[Any]) -> AsyncIterator[WorldEndpoint]:
    """An MCP endpoint whose tool `t` declares a string result; tools/call answers with the next of `results`."""
    schema = {"type": "object", "properties": {"v": {"type": "string", "nullable": True}}, "required": ["v"]}
    pages = {
        None: {
            "tools": [{"name": "s_t", "inputSchema": {"type": "object"}, "outputSchema": schema}],
            "nextCursor": "2",
        },
        "2": {"tools": [{"name": "s_u", "inputSchema": {"type": "object"}}]},
    }

    async def mcp(request: Request) -> Response:
        message = await request.json()
        if "id" not in message:
            return Response(status_code=202)
        reply: dict[str, Any]
        if message["method"] == "initialize":
            version = message["params"]["protocolVersion"]
            info = {"name": "w", "version": "1"}
            reply = {"result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}}
        elif message["method"] == "tools/list":
            reply = {"result": pages[(message.get("params") or {}).get("cursor")]}
        else:
            told = results.pop(0)
            if isinstance(told, Response):
                return told
            if isinstance(told, float):
                await asyncio.sleep(told)
            reply = told if isinstance(told, dict) else {"result": {"content": []}}
        return JSONResponse({"jsonrpc": "2.0", "id": message["id"], **reply})

    async with serve("/mcp/", mcp) as base_url:
        yield WorldEndpoint(base_url)


def text(*texts: str, **more: Any) -> dict[str, Any]:
    return {"result": {"content": [{"type": "text", "text": t} for t in texts], **more}}


async def ask(endpoint: WorldEndpoint, call_timeout_s: float = 20) -> list[Any]:
    async def both(session: WorldSession) -> list[Any]:
        tools = await session.tools()
        assert [t.name for t in tools] == ["s_t", "s_u"]
        return [await session.call(tool, {}) for tool in tools]

    async with open_world(endpoint, call_timeout_s=call_timeout_s) as session:
        return await both(session)


async def test_a_result_against_its_own_schema_is_still_read() -> None:
    wrong = text("fine", structuredContent={"v": None})
    async with misbehaving([wrong, wrong, wrong]) as endpoint:
        assert [r.text for r in await ask(endpoint)] == ["fine", "fine"]
        # The public client would have failed the call.
        async with (
            endpoint.http_client() as http,
            streamable_http_client(endpoint.base_url + "/mcp/", http_client=http) as streams,
            ClientSession(streams[0], streams[1]) as session,
        ):
            await session.initialize()
            with pytest.raises(RuntimeError, match="Invalid structured content"):
                await session.call_tool("s_t", {})


async def test_what_is_not_text_is_named() -> None:
    image = {"result": {"content": [{"type": "image", "data": "aGk=", "mimeType": "image/png"}]}}
    async with misbehaving([image, text("a", "b", isError=True)]) as endpoint:
        first, second = await ask(endpoint)
    assert first.ok and first.text == "[image omitted: this agent reads text only]"
    assert not second.ok and second.text == "a\nb"


async def test_protocol_errors_and_slow_tools_are_results() -> None:
    refused = {"error": {"code": -32602, "message": "bad arguments"}}
    async with misbehaving([refused, 1.5]) as endpoint:
        first, second = await ask(endpoint, call_timeout_s=0.5)
    assert (first.ok, first.text) == (False, "Error: bad arguments")
    assert not second.ok and "Timed out" in second.text


@pytest.mark.parametrize("reply", [PlainTextResponse("broken", 500), PlainTextResponse("gone", 502)])
async def test_a_broken_gateway_is_lost(reply: Response) -> None:
    async with misbehaving([reply]) as endpoint:
        with pytest.raises(WorldLostError):
            await ask(endpoint)
