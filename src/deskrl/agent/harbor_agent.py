"""`DeskAgent`: the harbor agent that works in a world through its MCP tools.

Set-up starts the world and proves that every declared tool server is up; a missing one is an infrastructure
failure, never a worse score. The run holds the conversation. Whatever happens, the trial's folder gets
`trajectory.json` (messages; what the grader reads) and, for a token policy, `tokens.npz` (the ledger).
"""

from __future__ import annotations

import asyncio
import difflib
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, override

import httpx
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from pydantic import BaseModel, ConfigDict, ValidationError

from deskrl.agent.catalogue import essential, server_of
from deskrl.agent.chat_policy import ChatPolicy
from deskrl.agent.engine import CompletionsEngine
from deskrl.agent.errors import AgentConfigError, WorldLostError, WorldNotReadyError
from deskrl.agent.files import TOKENS_FILE, TRAJECTORY_FILE
from deskrl.agent.loop import LoopLimits, LoopState, run_loop
from deskrl.agent.mcp_session import WorldEndpoint, open_world
from deskrl.agent.model_files import load_renderer
from deskrl.agent.policy import Policy, TokenLimits, TokenPolicy


class AgentSettings(BaseModel):
    """The agent's kwargs in a trial config. Times in seconds, sizes in tokens unless named otherwise."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str
    served_model: str
    policy: str = "tokens"
    """`tokens` (token-in/token-out, trains) or `chat` (any chat-completions API, evaluation only)."""
    model_dir: str | None = None
    """Directory with the tokenizer and chat template; needed by the token policy."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key of a chat endpoint."""
    sampling: dict[str, Any] = {}
    max_context: int = 160_000
    max_turn_tokens: int = 40_000
    max_turns: int = 100
    tool_timeout_s: float = 600.0
    model_timeout_s: float = 1800.0
    engine_retry_s: float = 60.0
    world_timeout_s: float = 900.0
    task_slug: str = "task"
    tools: list[str] | None = None
    """Names of the tools the model sees; None: all."""
    optional_arguments: bool = True
    """Whether the model sees optional arguments of tools; without them a small context lasts longer."""


class DeskAgent(BaseAgent):
    """Works on a task with the world's tools. `kwargs` are the fields of `AgentSettings`."""

    def __init__(self, logs_dir: Path, *args: Any, **kwargs: Any) -> None:
        own = {k: v for k, v in kwargs.items() if k in AgentSettings.model_fields}
        rest = {k: v for k, v in kwargs.items() if k not in own}
        unknown = [k for k in rest if k not in _HARBOR_KWARGS]
        if unknown:
            near = difflib.get_close_matches(unknown[0], AgentSettings.model_fields, n=1)
            raise AgentConfigError(
                f"agent kwargs: unknown key {unknown[0]!r}" + (f", did you mean {near[0]!r}?" if near else "")
            )
        super().__init__(logs_dir, *args, **rest)
        try:
            self.settings = AgentSettings.model_validate(own)
        except ValidationError as error:
            raise AgentConfigError(f"agent kwargs: {error}") from error
        self._state = LoopState()
        self._policy: Policy | None = None

    @staticmethod
    @override
    def name() -> str:
        return "deskrl"

    @override
    def version(self) -> str:
        return "0.1.0"

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        """Starts the world and waits until it is whole.

        Raises:
            WorldNotReadyError: it did not answer in time, or a declared server has no tools.
        """
        spawn = getattr(environment, "spawn", None)
        if spawn is None:
            raise AgentConfigError(f"{type(environment).__name__} has no spawn(): it cannot host a world")
        await spawn(f"/app/tools/start.sh {self.settings.task_slug}", "/tmp/start.log")
        declared = await self._declared_servers(environment)
        deadline = time.monotonic() + self.settings.world_timeout_s
        problem = "no answer"
        while time.monotonic() < deadline:
            try:
                problem = await self._missing(_endpoint(environment), declared)
            except (httpx.HTTPError, WorldLostError, OSError) as error:
                problem = f"{type(error).__name__}: {error}"
            if not problem:
                return
            await asyncio.sleep(0.1)
        log = await environment.exec("tail -c 2000 /tmp/start.log", timeout_sec=10)
        raise WorldNotReadyError(
            f"world not ready in {self.settings.world_timeout_s:g} s: {problem}; "
            f"end of start.log: {(log.stdout or '').strip()!r}"
        )

    async def _declared_servers(self, environment: BaseEnvironment) -> list[str]:
        result = await environment.exec("cat /app/tools/mcp.json", timeout_sec=30)
        try:
            return sorted(json.loads(result.stdout or "")["mcpServers"])
        except (ValueError, KeyError, TypeError) as error:
            raise WorldNotReadyError(f"/app/tools/mcp.json declares no mcpServers: {error}") from error

    async def _missing(self, endpoint: WorldEndpoint, declared: list[str]) -> str:
        async with endpoint.http_client(timeout=5.0) as http:
            health = await http.get(endpoint.base_url + "/health")
            if health.status_code != 200:
                return f"/health answered {health.status_code}"
        async with open_world(endpoint, call_timeout_s=30.0) as world:
            present = {server_of(tool.name, declared) for tool in await world.tools()}
        missing = [server for server in declared if server not in present]
        return f"declared servers without tools: {', '.join(missing)}" if missing else ""

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Holds the conversation and writes the trial's files, also when cancelled."""
        started = time.monotonic()
        settings = self.settings
        limits = LoopLimits(max_turns=settings.max_turns)
        status = "error"
        try:
            self._policy = await asyncio.to_thread(self._make_policy)
            async with open_world(_endpoint(environment), call_timeout_s=settings.tool_timeout_s) as world:
                tools = await world.tools()
                if settings.tools is not None:
                    tools = [tool for tool in tools if tool.name in settings.tools]
                if not settings.optional_arguments:
                    tools = [essential(tool) for tool in tools]
                stop = await run_loop(self._policy, world.call, tools, instruction, limits, self._state)
                status = "completed" if stop == "answer" else stop.value
        except asyncio.CancelledError:
            status = "timeout"
            raise
        finally:
            self._write_files(status, time.monotonic() - started)
            self._fill(context)

    def _make_policy(self) -> Policy:
        settings = self.settings
        if settings.policy == "chat":
            key = os.environ.get(settings.api_key_env) if settings.api_key_env else None
            if settings.api_key_env and not key:
                raise AgentConfigError(f"environment variable {settings.api_key_env} is not set")
            return ChatPolicy(
                settings.base_url,
                settings.served_model,
                api_key=key,
                max_turn=settings.max_turn_tokens,
                sampling=settings.sampling,
                timeout_s=settings.model_timeout_s,
                retry_s=settings.engine_retry_s,
            )
        if settings.policy != "tokens" or settings.model_dir is None:
            raise AgentConfigError("agent kwargs: policy must be 'tokens' (with model_dir) or 'chat'")
        return TokenPolicy(
            CompletionsEngine(
                settings.base_url,
                settings.served_model,
                timeout_s=settings.model_timeout_s,
                retry_s=settings.engine_retry_s,
            ),
            load_renderer(settings.model_dir),
            TokenLimits(settings.max_context, settings.max_turn_tokens),
            sampling=settings.sampling,
            session_id=str(self.context_id or self.session_id or id(self)),
        )

    def _write_files(self, status: str, seconds: float) -> None:
        self.logs_dir.mkdir(parents=True, exist_ok=True)
        trajectory = {
            "messages": self._state.messages,
            "status": status,
            "time_elapsed": round(seconds, 3),
            "finalized": status == "completed",
            "steps": [asdict(step) for step in self._state.steps],
        }
        _write(
            self.logs_dir / TRAJECTORY_FILE,
            json.dumps(trajectory, ensure_ascii=False).encode(errors="backslashreplace"),
        )
        if isinstance(self._policy, TokenPolicy):
            _write(self.logs_dir / TOKENS_FILE, self._policy.ledger.to_bytes())

    def _fill(self, context: AgentContext) -> None:
        steps = self._state.steps
        calls = [tool for step in steps for tool in step.tools]
        context.n_output_tokens = sum(step.tokens for step in steps)
        context.metadata = {
            "stop_reason": self._state.stop_reason.value if self._state.stop_reason else None,
            "turns": len(steps),
            "tool_calls": len(calls),
            "tool_failures": sum(not call.ok for call in calls),
            "model_seconds": round(sum(step.model_seconds for step in steps), 3),
            "tool_seconds": round(sum(call.seconds for call in calls), 3),
        }
        if isinstance(self._policy, TokenPolicy):
            context.n_input_tokens = len(self._policy.ledger) - self._policy.ledger.sampled


_HARBOR_KWARGS = frozenset(
    [
        "model_name",
        "logger",
        "mcp_servers",
        "skills_dir",
        "extra_env",
        "load_trajectory",
        "session_id",
        "context_id",
        "config",
    ]
)


def _endpoint(environment: BaseEnvironment) -> WorldEndpoint:
    endpoint: WorldEndpoint | None = getattr(environment, "world_endpoint", None)
    if endpoint is None:
        raise AgentConfigError(f"{type(environment).__name__} has no world_endpoint: it cannot host a world")
    return endpoint


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(path.suffix + ".part")
    temporary.write_bytes(data)
    temporary.replace(path)
