"""The MCP server side, by hand: JSON-RPC 2.0 messages in, replies out. Pure apart from the tool calls.

Model: the server is stateless, so each POST body holds all that its reply needs: no session ids, no
event streams, a plain JSON reply. That is a conforming streamable-HTTP server, which the public MCP
clients accept. The SDK is not used because importing it takes longer (1.4 s, measured) than starting
everything else here, and every trial starts one world.

Invariants: a notification gets no reply; a failing tool is a result with `isError`, not a protocol
error; an unexpected exception inside a tool is reported to the model by its type and logged in full.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from deskrl.worlds.toolkit import Tool, ToolError

PROTOCOL_VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602

_log = logging.getLogger(__name__)


def reply_to(message: Any, tools: Mapping[str, Tool]) -> dict[str, Any] | None:
    """Return the reply to one JSON-RPC message, or None for a notification or a response."""
    if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
        return error_reply(None, INVALID_REQUEST, "expected a JSON-RPC 2.0 object")
    method = message.get("method")
    if "id" not in message or method is None:
        return None
    request_id = message["id"]
    params = message.get("params") or {}
    if not isinstance(params, dict):
        return error_reply(request_id, INVALID_PARAMS, "params must be an object")
    if method == "initialize":
        return _result(request_id, _initialize(params))
    if method == "ping":
        return _result(request_id, {})
    if method == "tools/list":
        return _result(request_id, {"tools": [tool.definition() for tool in tools.values()]})
    if method == "tools/call":
        return _call(request_id, params, tools)
    return error_reply(request_id, METHOD_NOT_FOUND, f"method {method!r} is not supported")


def error_reply(request_id: Any, code: int, message: str) -> dict[str, Any]:
    """Return a JSON-RPC error."""
    return {"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": message}}


def _result(request_id: Any, result: dict[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request_id, "result": result}


def _initialize(params: dict[str, Any]) -> dict[str, Any]:
    wanted = params.get("protocolVersion")
    return {
        "protocolVersion": wanted if wanted in PROTOCOL_VERSIONS else PROTOCOL_VERSIONS[0],
        "capabilities": {"tools": {"listChanged": False}},
        "serverInfo": {"name": "deskrl-world", "version": "1"},
    }


def _call(request_id: Any, params: dict[str, Any], tools: Mapping[str, Tool]) -> dict[str, Any]:
    name, arguments = params.get("name"), params.get("arguments") or {}
    tool = tools.get(name) if isinstance(name, str) else None
    if tool is None:
        return error_reply(request_id, INVALID_PARAMS, f"unknown tool {name!r}")
    if not isinstance(arguments, dict):
        return error_reply(request_id, INVALID_PARAMS, "arguments must be an object")
    failed = False
    try:
        text = tool.call(arguments)
    except ToolError as error:
        failed, text = True, f"Error: {error}"
    except Exception as error:
        _log.exception("tool %s failed", name)
        failed, text = True, f"Error: {name} failed inside the world server ({type(error).__name__}: {error})"
    return _result(request_id, {"content": [{"type": "text", "text": text}], "isError": failed})
