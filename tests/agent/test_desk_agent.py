"""The harbor agent in a real sandbox with the sample world, and what it refuses before and during a trial."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from agent_servers import Scripted, completions, serve, spoken
from harbor.models.agent.context import AgentContext
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths

from deskrl.agent.errors import AgentConfigError, EngineProtocolError, WorldLostError, WorldNotReadyError
from deskrl.agent.harbor_agent import DeskAgent
from deskrl.sandbox.bubblewrap import BubblewrapEnvironment
from deskrl.tokens import ChatMLRenderer, ChatTokenizer, SpanKind, TokenLedger

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes need Linux namespaces")
READ = '<tool_call>\n{"name": "filesystem_read_text_file", "arguments": {"file_path": "/team/notes.md"}}\n</tool_call>'
Start = Callable[[Path], Awaitable[BubblewrapEnvironment]]


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts sandboxes with a world; stops them at the end."""
    started: list[BubblewrapEnvironment] = []

    async def start(world: Path) -> BubblewrapEnvironment:
        (tmp_path / "environment").mkdir()
        paths = TrialPaths(trial_dir=tmp_path / "trial")
        paths.mkdir()
        environment = BubblewrapEnvironment(
            environment_dir=tmp_path / "environment",
            environment_name="test",
            session_id="test",
            trial_paths=paths,
            task_env_config=EnvironmentConfig(),
            world_dir=world,
            trusted_agent_files=[],
        )
        started.append(environment)
        await environment.start()
        return environment

    yield start
    for environment in started:
        await environment.stop()


def agent(logs: Path, tiny: Path, base_url: str = "http://127.0.0.1:9", **kwargs: Any) -> DeskAgent:
    settings = {"model_dir": str(tiny), "max_context": 4000, "max_turn_tokens": 200, "engine_retry_s": 5.0}
    settings |= {"world_timeout_s": 60.0, **kwargs}
    return DeskAgent(logs, base_url=base_url, served_model="m", **settings)


@needs_linux
async def test_a_trial_from_world_to_ledger(
    sandbox: Start, pristine: Path, tmp_path: Path, tiny: Path, tokenizer: ChatTokenizer
) -> None:
    environment = await sandbox(pristine)
    says = ["I look it up. " + READ, "<tool_call>{", "Nora Pike leads it."]
    async with completions(*(spoken(tokenizer, text) for text in says)) as server:
        desk = agent(tmp_path / "logs", tiny, server.base_url, tools=["filesystem_read_text_file"])
        await desk.setup(environment)
        context = AgentContext()
        await desk.run("Who leads Project Heron?", environment, context)

    notes = (pristine / "filesystem/team/notes.md").read_text()
    trajectory = json.loads((tmp_path / "logs/trajectory.json").read_text())
    assert (trajectory["status"], trajectory["finalized"]) == ("completed", True)
    messages = trajectory["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    assert messages[2]["tool_calls"][0]["arguments"] == {"file_path": "/team/notes.md"}
    assert messages[3]["content"] == notes and messages[-1]["content"] == says[-1]
    assert [[t["name"] for t in step["tools"]] for step in trajectory["steps"]] == [
        ["filesystem_read_text_file"],
        [],
        [],
    ]

    ledger = TokenLedger.from_bytes((tmp_path / "logs/tokens.npz").read_bytes())
    turn = [SpanKind.GENERATION, SpanKind.CLOSE]
    told = [SpanKind.OBSERVATION, SpanKind.INJECTED]
    assert [s.kind for s in ledger.spans] == [SpanKind.PROMPT, *turn, told[0], *turn, told[1], *turn]
    parts = [tokenizer.decode(ledger.ids[s.start : s.end]) for s in ledger.spans]
    # The model saw one tool's definition, the task and the tool's answer, and nothing it said was changed.
    assert parts[0].count('"type": "function"') == 1 and "Who leads Project Heron?<|im_end|>" in parts[0]
    assert [parts[1], parts[4], parts[7]] == [text + "<|im_end|>" for text in says]
    assert parts[3] == (
        f"<|im_start|>user\n<tool_response>\n{notes}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert "could not be read" in parts[6]
    for span in ledger.spans:
        assert set(ledger.loss_mask[span.start : span.end]) == {int(span.kind is SpanKind.GENERATION)}
    assert [body["prompt"] for body in server.bodies] == [
        ledger.ids[: s.start] for s in ledger.spans if s.kind is SpanKind.GENERATION
    ]
    assert ledger.training_split()[2][-1] == 1

    assert context.n_output_tokens == ledger.sampled and context.n_input_tokens == len(ledger) - ledger.sampled
    assert context.metadata is not None
    times = {k: context.metadata.pop(k) for k in ("model_seconds", "tool_seconds")}
    assert all(seconds >= 0 for seconds in times.values())
    assert context.metadata == {"stop_reason": "answer", "turns": 3, "tool_calls": 1, "tool_failures": 0}


@needs_linux
async def test_failures_in_the_middle_keep_the_record(
    sandbox: Start, pristine: Path, tmp_path: Path, tiny: Path, tokenizer: ChatTokenizer
) -> None:
    environment = await sandbox(pristine)
    async with completions(spoken(tokenizer, READ), (404, "no such model")) as server:
        desk = agent(tmp_path / "logs", tiny, server.base_url)
        await desk.setup(environment)
        context = AgentContext()
        with pytest.raises(EngineProtocolError, match="no such model"):
            await desk.run("Who?", environment, context)
    trajectory = json.loads((tmp_path / "logs/trajectory.json").read_text())
    assert (trajectory["status"], trajectory["finalized"]) == ("error", False)
    assert trajectory["messages"][-1]["role"] == "tool"
    assert TokenLedger.from_bytes((tmp_path / "logs/tokens.npz").read_bytes()).turns == 1
    assert context.metadata is not None and context.metadata["stop_reason"] is None

    # The world's processes die between two turns: the world's fault, by name.
    async def kill(body: Any) -> Any:
        await environment.quiesce()
        return spoken(tokenizer, READ)

    async with completions(kill) as server:
        with pytest.raises(WorldLostError):
            await agent(tmp_path / "second", tiny, server.base_url).run("Who?", environment, AgentContext())
    assert json.loads((tmp_path / "second/trajectory.json").read_text())["status"] == "error"


@needs_linux
async def test_a_chat_model_needs_no_model_directory(
    sandbox: Start, pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = await sandbox(pristine)
    message = {"role": "assistant", "content": "It is \ud83e."}
    server = Scripted([(200, json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}))])
    async with serve("/v1/chat/completions", server.answer) as base_url:
        kwargs: dict[str, Any] = {
            "policy": "chat",
            "base_url": base_url,
            "served_model": "m",
            "api_key_env": "DESKRL_TEST_KEY",
        }
        kwargs["world_timeout_s"] = 60.0
        desk = DeskAgent(tmp_path / "logs", **kwargs)
        await desk.setup(environment)
        monkeypatch.delenv("DESKRL_TEST_KEY", raising=False)
        with pytest.raises(AgentConfigError, match="environment variable DESKRL_TEST_KEY is not set"):
            await desk.run("Who?", environment, AgentContext())
        monkeypatch.setenv("DESKRL_TEST_KEY", "secret")
        desk = DeskAgent(tmp_path / "logs", **kwargs)
        context = AgentContext()
        await desk.run("Who?", environment, context)
    assert len(server.bodies[0]["tools"]) > 10
    assert context.metadata is not None and context.metadata["stop_reason"] == "answer"
    written = (tmp_path / "logs/trajectory.json").read_text()
    # Half a surrogate pair is kept as JSON writes it, and costs no trial.
    assert json.loads(written)["messages"][-1]["content"] == message["content"]
    assert "secret" not in written and not (tmp_path / "logs/tokens.npz").exists()


@needs_linux
async def test_a_world_that_does_not_come_up_is_said_with_its_log(
    sandbox: Start, pristine: Path, tmp_path: Path, tiny: Path
) -> None:
    world = shutil.copytree(pristine, tmp_path / "world")
    (world / "app/tools/mcp.json").write_text('{"mcpServers": {"filesystem": {}, "crm": {}}}')
    desk = agent(tmp_path / "logs", tiny, world_timeout_s=1.5)
    with pytest.raises(WorldNotReadyError, match=r"(?s)not ready in 1.5 s.*start.log.*mcpServers\.crm: unknown server"):
        await desk.setup(await sandbox(world))


@needs_linux
async def test_a_declared_server_without_tools_is_named(
    sandbox: Start, pristine: Path, tmp_path: Path, tiny: Path
) -> None:
    world = shutil.copytree(pristine, tmp_path / "world")
    tools = world / "app/tools"
    # A start script that serves less than mcp.json declares.
    (tools / "less.json").write_text('{"mcpServers": {"filesystem": {}}}')
    script = (tools / "start.sh").read_text().replace("/app/tools/mcp.json", "/app/tools/less.json")
    (tools / "start.sh").write_text(script)
    desk = agent(tmp_path / "logs", tiny, world_timeout_s=3)
    with pytest.raises(WorldNotReadyError, match="declared servers without tools: excel, mail, pdfs, word"):
        await desk.setup(await sandbox(world))


@needs_linux
async def test_a_world_that_declares_nothing_is_not_ready(
    sandbox: Start, pristine: Path, tmp_path: Path, tiny: Path
) -> None:
    world = shutil.copytree(pristine, tmp_path / "world")
    (world / "app/tools/mcp.json").write_text("[]")
    with pytest.raises(WorldNotReadyError, match=r"mcp\.json declares no mcpServers"):
        await agent(tmp_path / "logs", tiny).setup(await sandbox(world))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_turn": 3}, "unknown key 'max_turn', did you mean 'max_turns'"),
        ({"zzz": 3}, "unknown key 'zzz'$"),
        ({"max_turns": "many"}, "max_turns"),
        ({"sampling": 3}, "sampling"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, tiny: Path, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(AgentConfigError, match=message):
        agent(tmp_path, tiny, **kwargs)


def test_missing_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(AgentConfigError, match=r"(?s)base_url.*served_model"):
        DeskAgent(tmp_path)


@pytest.mark.parametrize("kwargs", [{"policy": "tokens"}, {"policy": "guess", "model_dir": "x"}])
def test_a_policy_without_what_it_needs_is_refused(tmp_path: Path, kwargs: dict[str, Any]) -> None:
    with pytest.raises(AgentConfigError, match="policy must be"):
        DeskAgent(tmp_path, base_url="http://x", served_model="m", **kwargs)._make_policy()


def test_harbors_own_arguments_pass_through(tmp_path: Path, tiny: Path) -> None:
    assert agent(tmp_path, tiny, model_name="openai/m", extra_env={"A": "b"}).extra_env == {"A": "b"}


async def test_an_environment_that_cannot_host_a_world(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(AgentConfigError, match=r"no spawn\(\)"):
        await agent(tmp_path, tiny).setup(object())  # type: ignore[arg-type]


def test_the_renderer_agrees_with_the_tests_idea_of_a_stop(tokenizer: ChatTokenizer) -> None:
    assert spoken(tokenizer, "x")["choices"][0]["token_ids"][-1] in ChatMLRenderer(tokenizer).stop_token_ids
