"""Evaluation of a model on tasks, without a trainer: the same agent, worlds and grading as in training.

A model behind an API needs neither torch nor SkyRL; a local one is served by the embedded engine for the
time of the evaluation and is sampled token by token, as in training.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from deskrl.agent.files import HARNESS_FILES
from deskrl.cache import cache_dir
from deskrl.tasks.load import find_tasks, load_task
from deskrl.tasks.problems import TaskFormatError
from deskrl.tasks.schema import Task
from deskrl.trials.progress import Progress as RunProgress
from deskrl.trials.report import TrialReport
from deskrl.trials.runner import RunnerSettings, TrialRequest, TrialRunner

SAMPLE = "sample"
_LOCAL_CONTEXT = 4096
_LOCAL_TURN = 256


class EvaluationError(RuntimeError):
    """The evaluation cannot start; the message says what to do."""


@dataclass(frozen=True)
class EvaluationRequest:
    """What to evaluate on what. Without `base_url`, `model` is a local model (see deskrl.training.models)."""

    tasks: str
    model: str
    base_url: str
    api_key_env: str | None
    worlds: Path | None
    samples: int
    concurrency: int
    out: Path
    patience_s: float = 60.0


def run_evaluation(request: EvaluationRequest, console: Console) -> list[TrialReport]:
    """Run every task `samples` times; reports in the order of tasks. Raises EvaluationError, KeyboardInterrupt."""
    from deskrl.sandbox.errors import SandboxUnavailable
    from deskrl.sandbox.runtime import find_bwrap, require_tools
    from deskrl.sandbox.sweep import sweep

    os.environ.setdefault("HARBOR_TELEMETRY", "0")
    tasks, worlds = _tasks(request)
    if request.api_key_env and not os.environ.get(request.api_key_env):
        raise EvaluationError(f"the environment variable {request.api_key_env} is not set")
    try:
        find_bwrap()
        require_tools()
        (request.out / "logs").mkdir(parents=True, exist_ok=True)
    except SandboxUnavailable as error:
        raise EvaluationError(str(error)) from error
    except OSError as error:
        raise EvaluationError(f"{request.out} cannot be written ({error.strerror})") from error
    try:
        with _policy(request, console) as agent:
            return asyncio.run(_run(request, tasks, worlds, agent, console))
    finally:
        sweep()


def _tasks(request: EvaluationRequest) -> tuple[list[Task], Path]:
    worlds = request.worlds
    if request.tasks == SAMPLE:
        from deskrl.worlds.sample_set import build_sample_set

        folder, sample_worlds = build_sample_set(cache_dir() / "sample")
        worlds = worlds or sample_worlds
    else:
        folder = Path(request.tasks).expanduser().absolute()
    try:
        tasks = [load_task(path) for path in find_tasks(folder)]
    except FileNotFoundError as error:
        raise EvaluationError(str(error)) from error
    except TaskFormatError as error:
        raise EvaluationError(str(error)) from error
    if not tasks:
        raise EvaluationError(f"{folder} holds no task (no task.toml at or below it)")
    if worlds is None:
        beside = [parent / "worlds" for parent in folder.parents[:2] if (parent / "worlds").is_dir()]
        if not beside:
            raise EvaluationError(f"no folder `worlds` beside {folder}: say where the worlds are with --worlds")
        worlds = beside[0]
    for task in tasks:
        if not (worlds / task.world_id).is_dir():
            raise EvaluationError(f"task {task.task_id} needs the world {task.world_id}, not found in {worlds}")
    return tasks, worlds


@contextmanager
def _policy(request: EvaluationRequest, console: Console) -> Iterator[dict[str, Any]]:
    """Yields the agent's keyword arguments; a local model is served meanwhile."""
    if request.base_url:
        yield {
            "policy": "chat",
            "base_url": request.base_url,
            "served_model": request.model,
            "api_key_env": request.api_key_env,
        }
        return
    from deskrl.training.cpu.launch import EngineError, EngineProcess
    from deskrl.training.models import ModelError, prepare_model

    try:
        with console.status(f"preparing the model {request.model} and its engine"):
            model = prepare_model(request.model)
            engine = EngineProcess(
                "embedded", model, "policy", log_path=request.out / "logs" / "engine.log", max_model_len=_LOCAL_CONTEXT
            ).start()
    except (EngineError, ModelError) as error:
        raise EvaluationError(str(error)) from error
    try:
        yield {
            "policy": "tokens",
            "base_url": engine.base_url,
            "served_model": "policy",
            "model_dir": str(model),
            "max_context": _LOCAL_CONTEXT,
            "max_turn_tokens": _LOCAL_TURN,
        }
    finally:
        engine.stop()


async def _run(
    request: EvaluationRequest, tasks: list[Task], worlds: Path, agent: dict[str, Any], console: Console
) -> list[TrialReport]:
    settings = RunnerSettings(
        trials_dir=request.out / "trials",
        agent={**agent, "engine_retry_s": request.patience_s},
        environment_kwargs={"trusted_agent_files": list(HARNESS_FILES), "run_id": "eval"},
        max_concurrent=request.concurrency,
    )
    runner = TrialRunner(settings, RunProgress(request.out))
    requests = [
        TrialRequest.of(
            task,
            worlds,
            repetition=repetition,
            sampling={"temperature": 1.0} if agent["policy"] == "tokens" else {},
        )
        for task in tasks
        for repetition in range(request.samples)
    ]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        handle = bar.add_task("trials", total=len(requests))

        async def one(trial: TrialRequest) -> TrialReport:
            report = await runner.run(trial)
            bar.advance(handle)
            return report

        return list(await asyncio.gather(*(one(trial) for trial in requests)))
