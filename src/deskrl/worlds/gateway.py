"""One process that serves a world: health, MCP, app configuration, populate and snapshot.

    python -m deskrl.worlds.gateway --filesystem /filesystem --apps-data /.apps_data \
        --config /app/tools/mcp.json [--uds PATH] [--host 127.0.0.1 --port 8000]

Model: `build_app` makes a Starlette application over a world's two directories and the servers named in
mcp.json; `main` binds it to a Unix socket, a TCP port, or both, in one event loop.

Invariants
- An unknown server name stops the start (exit 2): a world that silently lost its tools would give
  confident zeros.
- Tool calls run one at a time, in a thread: `/health` answers during a long one, and two edits of one
  workbook never interleave.
- The process binds before it reports itself as ready, and `/health` says `OK` only with tools mounted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from deskrl.worlds import archive, protocol
from deskrl.worlds.roots import Root, WorldRoots
from deskrl.worlds.servers import SERVERS, mount
from deskrl.worlds.toolkit import Tool

_LOCAL_HOSTS = {"localhost", "127.0.0.1", "::1"}
_MAX_MESSAGE_BYTES = 16 * 1024**2


class ConfigError(Exception):
    """An mcp.json that cannot be served; the text names the key and the fix."""


def tools_from_config(config: Any, roots: WorldRoots) -> dict[str, Tool]:
    """Return the tools of the servers that `config` (the parsed mcp.json) names, by public name.

    Raises `ConfigError` for a malformed config or an unknown server.
    """
    servers = config.get("mcpServers") if isinstance(config, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ConfigError('mcpServers: expected a non-empty object such as {"mcpServers": {"filesystem": {}}}')
    tools: dict[str, Tool] = {}
    for name in servers:
        if name not in SERVERS:
            raise ConfigError(
                f"mcpServers.{name}: unknown server; this gateway has {', '.join(SERVERS)}. "
                "Remove the entry or correct its name"
            )
        tools.update((tool.name, tool) for tool in mount(name, roots))
    return tools


class World:
    """The state of a serving world: its directories, its tools and the lock that orders tool calls."""

    def __init__(self, roots: WorldRoots, tools: dict[str, Tool]) -> None:
        self.roots = roots
        self.tools = tools
        self.lock = asyncio.Lock()

    async def health(self, request: Request) -> Response:
        """GET /health."""
        return PlainTextResponse("OK")

    async def mcp(self, request: Request) -> Response:
        """POST /mcp/: one JSON-RPC message (or a batch) in, one JSON reply out."""
        origin = request.headers.get("origin")
        if origin and urlsplit(origin).hostname not in _LOCAL_HOSTS:
            return PlainTextResponse("foreign origin refused", status_code=403)
        body = await request.body()
        if len(body) > _MAX_MESSAGE_BYTES:
            return PlainTextResponse("message too large", status_code=413)
        try:
            message = json.loads(body)
        except ValueError:
            return JSONResponse(protocol.error_reply(None, protocol.PARSE_ERROR, "not JSON"), status_code=400)
        batch = message if isinstance(message, list) else [message]
        async with self.lock:
            replies = [await asyncio.to_thread(protocol.reply_to, entry, self.tools) for entry in batch]
        answers = [reply for reply in replies if reply is not None]
        if not answers:
            return Response(status_code=202)
        return JSONResponse(answers if isinstance(message, list) else answers[0])

    async def apps(self, request: Request) -> Response:
        """POST /apps: mount the servers of a new mcp.json in place of the present ones."""
        try:
            tools = tools_from_config(json.loads(await request.body()), self.roots)
        except (ValueError, ConfigError) as error:
            return JSONResponse({"detail": str(error)}, status_code=400)
        async with self.lock:
            self.tools = tools
        return JSONResponse({"status": "ok", "tools": sorted(tools)})

    async def populate(self, request: Request) -> Response:
        """POST /data/populate?subsystem=...: unpack the multipart field `archive`."""
        subsystem = request.query_params.get("subsystem", "filesystem")
        async with request.form() as form:
            upload = form.get("archive")
            if upload is None or isinstance(upload, str):
                return JSONResponse({"detail": "multipart file field 'archive' is missing"}, status_code=400)
            try:
                async with self.lock:
                    added = await asyncio.to_thread(archive.populate, self.roots, subsystem, upload.file)
            except archive.ArchiveError as error:
                return JSONResponse({"detail": str(error)}, status_code=400)
        return JSONResponse(
            {
                "objects_added": added.objects_added,
                "subsystem": added.subsystem,
                "extracted_bytes": added.extracted_bytes,
            }
        )

    async def snapshot(self, request: Request) -> Response:
        """POST /data/snapshot: both subsystems as tar.gz."""
        descriptor, name = tempfile.mkstemp(suffix=".tar.gz")
        with os.fdopen(descriptor, "wb") as output:
            async with self.lock:
                await asyncio.to_thread(archive.snapshot, self.roots, output)
        return FileResponse(name, media_type="application/gzip", background=BackgroundTask(os.unlink, name))


def build_app(roots: WorldRoots, tools: dict[str, Tool]) -> Starlette:
    """Return the application of one world."""
    world = World(roots, tools)
    return Starlette(
        routes=[
            Route("/health", world.health, methods=["GET"]),
            # Clients differ in the trailing slash, and a redirect would cost each call a round trip.
            Route("/mcp", world.mcp, methods=["POST"]),
            Route("/mcp/", world.mcp, methods=["POST"]),
            Route("/apps", world.apps, methods=["POST"]),
            Route("/data/populate", world.populate, methods=["POST"]),
            Route("/data/snapshot", world.snapshot, methods=["POST"]),
        ]
    )


def bind(uds: Path | None, host: str, port: int | None) -> list[socket.socket]:
    """Return listening sockets for the requested addresses. Raises `OSError`.

    A stale socket file from an earlier process is replaced; the new one is open to every user, since
    the agent's side may run under another uid.
    """
    sockets = []
    if uds is not None:
        if uds.is_socket():
            uds.unlink()
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.bind(str(uds))
        os.chmod(uds, 0o666)
        sockets.append(unix)
    if port is not None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        tcp = socket.socket(family, socket.SOCK_STREAM)
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tcp.bind((host, port))
        sockets.append(tcp)
    return sockets


def main(argv: list[str] | None = None) -> int:
    """Serve a world until terminated; return the exit status (2 for a bad configuration)."""
    parser = argparse.ArgumentParser(prog="deskrl.worlds.gateway", description="Serve one world.")
    parser.add_argument("--filesystem", type=Path, required=True, help="directory tools see as /")
    parser.add_argument("--apps-data", type=Path, required=True, help="directory of mail and other app state")
    parser.add_argument("--config", type=Path, required=True, help="mcp.json")
    parser.add_argument("--uds", type=Path, help="Unix socket to listen on")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, help="TCP port to listen on; 0 picks a free one")
    options = parser.parse_args(argv)
    if options.uds is None and options.port is None:
        parser.error("give --uds, --port or both")
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(name)s %(message)s")
    for path in (options.filesystem, options.apps_data):
        if not path.is_dir():
            print(f"{path}: no such directory; create it or correct the option", file=sys.stderr)
            return 2
    roots = WorldRoots(Root.at(options.filesystem), Root.at(options.apps_data))
    try:
        tools = tools_from_config(json.loads(options.config.read_text(encoding="utf-8")), roots)
    except (OSError, ValueError, ConfigError) as error:
        print(f"{options.config}: {error}", file=sys.stderr)
        return 2
    try:
        sockets = bind(options.uds, options.host, options.port)
    except OSError as error:
        wanted = [str(options.uds)] if options.uds is not None else []
        wanted += [f"{options.host}:{options.port}"] if options.port is not None else []
        print(f"cannot listen on {' and '.join(wanted)}: {error}; give another address", file=sys.stderr)
        return 2
    # Tools write files that other service users must be able to edit.
    os.umask(0)
    config = uvicorn.Config(
        build_app(roots, tools), log_config=None, access_log=False, lifespan="off", ws="none", loop="asyncio"
    )
    for bound in sockets:
        logging.info("listening on %s with %d tools", bound.getsockname(), len(tools))
    asyncio.run(uvicorn.Server(config).serve(sockets=sockets))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
