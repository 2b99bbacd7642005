"""The core without the training extra: no torch, no SkyRL, no Ray, no transformers anywhere near it."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

HEAVY = ["torch", "skyrl", "ray", "transformers", "vllm", "litellm", "modal"]
# As if none of them were installed: importing one raises ImportError.
WITHOUT = f"import sys; sys.modules.update(dict.fromkeys({HEAVY}))\n"


def run(code: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["tasks", "--help"], ["doctor", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import sys\nfrom deskrl.cli import app\n"
        f"try:\n    app({arguments!r})\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {[*HEAVY, 'harbor', 'mcp', 'numpy', 'omegaconf']!r} if name in sys.modules])"
    )
    done = run(code, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


async def chat(request: Request) -> JSONResponse:
    """A model that reads the hours and answers."""
    body = await request.json()
    message: dict[str, Any] = {"role": "assistant", "content": "Tom Reyes worked 62 hours."}
    if body["messages"][-1]["role"] != "tool":
        function = {"name": "filesystem_read_text_file", "arguments": json.dumps({"file_path": "/team/hours.csv"})}
        message = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        }
    usage = {"prompt_tokens": 10, "completion_tokens": 5}
    reason = "tool_calls" if message["content"] is None else "stop"
    return JSONResponse({"choices": [{"index": 0, "message": message, "finish_reason": reason}], "usage": usage})


@pytest.fixture
def api() -> Iterator[str]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    with contextlib.closing(listener):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        server.should_exit = True
        thread.join(10)


def deskrl(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    code = WITHOUT + f"sys.argv = ['deskrl', *{list(arguments)!r}]\nfrom deskrl.cli import main\nmain()"
    return run(code, cwd=cwd)


def test_tasks_trial_and_evaluation_over_an_api_without_torch(tmp_path: Path, api: str) -> None:
    assert deskrl("tasks", "sample", "set", cwd=tmp_path).returncode == 0
    assert deskrl("tasks", "lint", "set/tasks", cwd=tmp_path).returncode == 0
    listed = deskrl("tasks", "list", "set/tasks", cwd=tmp_path)
    assert listed.returncode == 0 and "task_sample_01" in listed.stdout
    (task,) = [p.parent for p in (tmp_path / "set/tasks").glob("*/instruction.md") if "Tom Reyes" in p.read_text()]
    assert "hours" in deskrl("tasks", "show", str(task), cwd=tmp_path).stdout
    model = ["--base-url", api, "--model", "scripted"]
    trial = deskrl("trial", "run", str(task), *model, "--out", "trial", cwd=tmp_path)
    assert trial.returncode == 0, trial.stdout + trial.stderr
    assert "1.000" in trial.stdout and "answer" in trial.stdout
    whole = deskrl("eval", "--tasks", "set/tasks", *model, "--out", "all", cwd=tmp_path)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    reports = [json.loads(line) for line in (tmp_path / "all/trials.jsonl").read_text().splitlines()]
    assert len(reports) == 12 and {r["outcome"] for r in reports} == {"answer"}
    assert max(r["reward"] for r in reports) == 1.0 > min(r["reward"] for r in reports)


def test_doctor_without_training(tmp_path: Path) -> None:
    done = deskrl("doctor", cwd=tmp_path)
    assert "a sandbox starts" in done.stdout, done.stderr


def test_a_dead_api_fails_the_trial_and_is_not_a_zero(tmp_path: Path) -> None:
    done = deskrl("tasks", "sample", "set", cwd=tmp_path)
    task = sorted((tmp_path / "set/tasks").iterdir())[0]
    done = deskrl(
        "trial", "run", str(task), "--base-url", "http://127.0.0.1:9/v1", "--model", "m", "--out", "t",
        "--patience", "1", cwd=tmp_path,
    )  # fmt: skip
    report = json.loads((tmp_path / "t/trials.jsonl").read_text())
    assert report["outcome"] == "engine_unavailable" and report["reward"] is None
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
