"""A trial's MCP session with the world's gateway, over TCP or a Unix socket.

Entered and left in one task (anyio's cancel scopes demand it). A tool's own error is a result the model
reads; a gateway that went away is a `WorldLostError` and never the model's fault.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import httpx

from deskrl.agent.catalogue import Tool, make_tool
from deskrl.agent.errors import WorldLostError

if TYPE_CHECKING:
    from mcp import ClientSession


class WorldEndpoint(Protocol):
    """Where a world listens (`deskrl.sandbox.endpoint` implements it)."""

    base_url: str

    def http_client(self, **kwargs: Any) -> httpx.AsyncClient:
        """A client whose requests reach the world."""


@dataclass(frozen=True)
class ToolResult:
    """What a tool answered, as text; `ok` is False if the tool reported an error."""

    text: str
    ok: bool


class WorldSession:
    """An open session: list and call tools."""

    def __init__(self, session: ClientSession, call_timeout_s: float) -> None:
        self._session = session
        self._call_timeout_s = call_timeout_s

    async def tools(self) -> list[Tool]:
        """All tools of the world, all pages."""
        found: list[Tool] = []
        cursor: str | None = None
        while True:
            page = await self._session.list_tools(cursor)
            found += [make_tool(t.name, t.description or "", t.inputSchema) for t in page.tools]
            cursor = page.nextCursor
            if not cursor:
                return found

    async def call(self, tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
        """Calls a tool.

        Raises:
            WorldLostError: the connection to the gateway broke.
        """
        import anyio
        from mcp.shared.exceptions import McpError

        try:
            result = await self._session.call_tool(
                tool.name,
                tool.dispatch_arguments(arguments),
                read_timeout_seconds=timedelta(seconds=self._call_timeout_s),
            )
        except McpError as error:
            if "Connection closed" in str(error):
                raise WorldLostError(f"the gateway closed the session during {tool.name}") from error
            return ToolResult(f"Error: {error}", ok=False)
        except (httpx.TransportError, anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
            raise WorldLostError(f"{tool.name}: {type(error).__name__}: {error}") from error
        text = "\n".join(_text(block) for block in result.content)
        return ToolResult(text, ok=not result.isError)


def _text(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    return f"[{block.type} omitted: this agent reads text only]"


@asynccontextmanager
async def open_world(endpoint: WorldEndpoint, *, call_timeout_s: float) -> AsyncIterator[WorldSession]:
    """Opens an initialised MCP session at `endpoint`/mcp/.

    Raises:
        WorldLostError: the gateway cannot be reached, or went away inside the block.
    """
    from mcp import ClientSession
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared.exceptions import McpError

    class LenientSession(ClientSession):
        # Real worlds ship output schemas their own results violate (`nullable: true` read as "must be a
        # string"); the model reads the text, so the structured copy is not worth a failed call.
        async def _validate_tool_result(self, name: str, result: Any) -> None:
            return None

    try:
        async with (
            endpoint.http_client(timeout=httpx.Timeout(30.0, read=call_timeout_s + 30.0)) as http,
            streamable_http_client(endpoint.base_url + "/mcp/", http_client=http) as (read, write, _),
            LenientSession(read, write) as session,
        ):
            await session.initialize()
            yield WorldSession(session, call_timeout_s)
    except BaseExceptionGroup as group:
        # anyio wraps whatever left the block; harbor and our outcome table go by the real class.
        leaf: BaseException = group
        while isinstance(leaf, BaseExceptionGroup):
            leaf = leaf.exceptions[0]
        if isinstance(leaf, httpx.HTTPError | McpError):
            raise WorldLostError(f"the gateway is gone: {type(leaf).__name__}: {leaf}") from group
        raise leaf from group
