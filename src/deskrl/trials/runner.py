"""Runs harbor trials as asyncio tasks of this process and turns each into a `TrialReport`.

Model: `TrialRunner.run(request)` waits for admission (how many run at once, how fast they start), runs a real
harbor `Trial`, and reads what it left. Failures that a fresh sandbox may cure are tried again.

Invariants: `run` raises nothing but CancelledError. A cancelled trial has stopped its sandbox before the
cancellation leaves here (harbor finalises in `finally`). Agent and environment get JSON-serialisable keyword
arguments only, since harbor stores them in the trial's config.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deskrl.tasks.schema import Task
from deskrl.trials.outcome import Outcome, OutcomeKind, outcome_of, reward_of
from deskrl.trials.progress import Progress
from deskrl.trials.report import TrialReport

if TYPE_CHECKING:
    from harbor.models.trial.result import TimingInfo, TrialResult

AGENT = "deskrl.agent.harbor_agent:DeskAgent"
BUBBLEWRAP = "deskrl.sandbox.bubblewrap:BubblewrapEnvironment"
VERIFIER = "deskrl.sandbox.clean_verifier:CleanVerifier"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunnerSettings:
    """What all trials of a run share.

    Args:
        trials_dir: parent of the trial folders.
        agent: keyword arguments of the agent (`deskrl.agent.harbor_agent.AgentSettings`).
        environment: import path of the harbor environment; `environment_kwargs` go to its constructor.
        max_concurrent: trials at once; starts_per_second: how fast they may start.
        retries: further attempts after an outcome whose rule allows them.
        grade_truncated: see `deskrl.trials.outcome.reward_of`.
        agent_timeout_s: overrides the task's own agent timeout; None keeps it.
    """

    trials_dir: Path
    agent: Mapping[str, Any]
    environment: str = BUBBLEWRAP
    environment_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_concurrent: int = 16
    starts_per_second: float = 20.0
    retries: int = 1
    grade_truncated: bool = False
    agent_timeout_s: float | None = None
    agent_import_path: str = AGENT


@dataclass(frozen=True)
class TrialRequest:
    """One trial to run. `world_dir` is the world's folder on this host, for environments that copy it in."""

    task_path: Path
    task_id: str
    slug: str
    bucket: str
    world_dir: Path | None
    phase: str = "eval"
    step: int | None = None
    repetition: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_turn_tokens: int | None = None

    @classmethod
    def of(cls, task: Task, worlds: Path | None, **settings: Any) -> TrialRequest:
        """A request for a loaded task; `worlds` is a folder of worlds named by world id."""
        return cls(
            task_path=task.path,
            task_id=task.task_id,
            slug=task.slug,
            bucket=task.bucket,
            world_dir=None if worlds is None else worlds / task.world_id,
            **settings,
        )


class TrialRunner:
    """Admits and runs trials. One per process and event loop."""

    def __init__(self, settings: RunnerSettings, progress: Progress) -> None:
        self._settings = settings
        self._progress = progress
        self._slots = asyncio.Semaphore(settings.max_concurrent)
        self._pace = asyncio.Lock()
        self._next_start = 0.0

    async def run(self, request: TrialRequest) -> TrialReport:
        """The report of the last attempt. Raises CancelledError only."""
        async with self._slots:
            report = await self._attempt(request, 0)
            for attempt in range(1, self._settings.retries + 1):
                if not report.outcome.rule.retried:
                    break
                _log.warning("trial %s: %s; again", report.name, report.outcome.detail)
                report = await self._attempt(request, attempt)
        try:
            self._progress.finished(report)
        except OSError as error:
            _log.error("trial %s could not be logged: %s", report.name, error)
        return report

    async def _attempt(self, request: TrialRequest, attempt: int) -> TrialReport:
        await self._wait_for_start()
        name = _trial_name(request, attempt)
        started = time.monotonic()
        result: TrialResult | None = None
        failure: tuple[str, str] | None = None
        self._progress.started()
        try:
            result = await self._run_harbor(request, name)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # Trial.create raises before there is a result to record it in
            _log.exception("trial %s", name)
            failure = (type(error).__name__, str(error))
        finally:
            self._progress.ended()
        return self._report(request, attempt, name, result, failure, time.monotonic() - started)

    async def _wait_for_start(self) -> None:
        async with self._pace:
            now = time.monotonic()
            start = max(self._next_start, now)
            self._next_start = start + 1.0 / self._settings.starts_per_second
            delay = start - now
        if delay > 0:
            await asyncio.sleep(delay)

    async def _run_harbor(self, request: TrialRequest, name: str) -> TrialResult:
        from harbor.models.trial.config import (
            AgentConfig,
            EnvironmentConfig,
            TaskConfig,
            TrialConfig,
            VerifierConfig,
        )
        from harbor.trial.trial import Trial

        settings = self._settings
        agent = {**settings.agent, "task_slug": request.slug, "sampling": dict(request.sampling)}
        if request.max_turn_tokens is not None:
            agent["max_turn_tokens"] = request.max_turn_tokens
        world = {} if request.world_dir is None else {"world_dir": str(request.world_dir)}
        trial = await Trial.create(
            TrialConfig(
                task=TaskConfig(path=request.task_path),
                trial_name=name,
                trials_dir=settings.trials_dir,
                agent=AgentConfig(
                    import_path=settings.agent_import_path,
                    kwargs=agent,
                    override_timeout_sec=settings.agent_timeout_s,
                ),
                environment=EnvironmentConfig(
                    import_path=settings.environment, kwargs={**settings.environment_kwargs, **world}
                ),
                verifier=VerifierConfig(import_path=VERIFIER),
            )
        )
        return await trial.run()

    def _report(
        self,
        request: TrialRequest,
        attempt: int,
        name: str,
        result: TrialResult | None,
        failure: tuple[str, str] | None,
        seconds: float,
    ) -> TrialReport:
        path = self._settings.trials_dir / name
        told: dict[str, Any] = {}
        rewards: dict[str, float] = {}
        tokens = 0
        times: dict[str, float] = {}
        if result is not None:
            if result.agent_result is not None:
                told = dict(result.agent_result.metadata or {})
                tokens = result.agent_result.n_output_tokens or 0
            if result.verifier_result is not None:
                rewards = {key: float(value) for key, value in (result.verifier_result.rewards or {}).items()}
            if result.exception_info is not None:
                failure = (result.exception_info.exception_type, result.exception_info.exception_message)
            times = _times(result)
        graded = rewards.get("reward")
        outcome = outcome_of(told.get("stop_reason"), failure, graded is not None)
        if outcome.kind is OutcomeKind.GRADING_FAILED:
            outcome = Outcome(outcome.kind, _grader_message(path) or outcome.detail)
        return TrialReport(
            name=name,
            task_id=request.task_id,
            bucket=request.bucket,
            phase=request.phase,
            step=request.step,
            repetition=request.repetition,
            attempt=attempt,
            outcome=outcome,
            reward=reward_of(outcome, graded, grade_truncated=self._settings.grade_truncated),
            criteria={k: v for k, v in rewards.items() if k.startswith("criterion/")},
            path=path,
            seconds=seconds,
            turns=told.get("turns", 0),
            tokens=tokens,
            tool_calls=told.get("tool_calls", 0),
            tool_failures=told.get("tool_failures", 0),
            model_seconds=told.get("model_seconds", 0.0),
            tool_seconds=told.get("tool_seconds", 0.0),
            times=times,
        )


def _trial_name(request: TrialRequest, attempt: int) -> str:
    """Unique, sortable, and short: it becomes a folder and part of harbor's session id."""
    slug = re.sub(r"[^A-Za-z0-9_-]+", "-", request.slug)[:48].strip("-")
    step = "" if request.step is None else f"-{request.step}"
    return f"{request.phase}{step}__{slug}__r{request.repetition}a{attempt}-{secrets.token_hex(3)}"


def _times(result: TrialResult) -> dict[str, float]:
    phases: dict[str, TimingInfo | None] = {
        "sandbox": result.environment_setup,
        "world": result.agent_setup,
        "agent": result.agent_execution,
        "grading": result.verifier,
    }
    return {
        name: round((timing.finished_at - timing.started_at).total_seconds(), 3)
        for name, timing in phases.items()
        if timing is not None and timing.started_at is not None and timing.finished_at is not None
    }


def _grader_message(path: Path) -> str:
    """What the stand-alone grader said went wrong, if it got that far."""
    try:
        error = json.loads((path / "verifier" / "grading_error.json").read_text())
        return f"{error.get('kind', 'grading')}: {error.get('message', '')}"
    except (OSError, ValueError, AttributeError):
        return ""
