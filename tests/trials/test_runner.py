"""Real harbor trials in real sandboxes over the real sample world; only the model is scripted."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from scripted_engine import ScriptedEngine, serving

from deskrl.sandbox.sweep import live_sandboxes
from deskrl.tasks.load import load_task
from deskrl.tokens import TokenLedger
from deskrl.trials.outcome import OutcomeKind
from deskrl.trials.progress import Progress
from deskrl.trials.report import TrialReport
from deskrl.trials.runner import RunnerSettings, TrialRequest, TrialRunner

TOOL_CALL = (
    '<tool_call>\n{"name": "filesystem_read_text_file", "arguments": {"file_path": "/team/hours.csv"}}\n</tool_call>'
)
ANSWER = "Tom Reyes worked 62 hours."


def read_then_answer(prompt: str) -> str:
    return ANSWER if "<tool_response>" in prompt else TOOL_CALL


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine(tiny_model, read_then_answer)
    with serving(engine) as url:
        engine.url = url  # type: ignore[attr-defined]
        yield engine


@pytest.fixture
async def scratch(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Path]:
    """A scratch root of one's own; nothing may be left in it."""
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="dr-test-", dir="/tmp"))
    folder.chmod(0o711)
    yield folder
    left = [sandbox.path for sandbox in live_sandboxes(folder)]
    shutil.rmtree(folder, ignore_errors=True)
    assert left == []


class Setup:
    """A task, its world and a runner over them."""

    def __init__(
        self, engine: ScriptedEngine, scratch: Path, sample: tuple[Path, Path], model: Path, out: Path
    ) -> None:
        self.engine, self.scratch, self.model, self.out = engine, scratch, model, out
        tasks, worlds = sample
        found = [load_task(path) for path in sorted(tasks.iterdir()) if (path / "task.toml").exists()]
        self.task = next(task for task in found if "Tom Reyes" in task.instruction)
        self.world = worlds / self.task.world_id

    def runner(self, **changes: object) -> TrialRunner:
        agent = {
            "base_url": self.engine.url,  # type: ignore[attr-defined]
            "served_model": "policy",
            "model_dir": str(self.model),
            "max_context": 8192,
            "max_turn_tokens": 200,
            "engine_retry_s": 0.5,
            "world_timeout_s": 20.0,
            **changes.pop("agent", {}),  # type: ignore[dict-item]
        }
        kwargs = {
            "scratch_dir": str(self.scratch),
            "trusted_agent_files": ["trajectory.json", "tokens.npz"],
            **changes.pop("environment_kwargs", {}),  # type: ignore[dict-item]
        }
        settings = RunnerSettings(self.out / "trials", agent, environment_kwargs=kwargs, **{"retries": 0, **changes})  # type: ignore[arg-type]
        return TrialRunner(settings, Progress(self.out))

    def request(self, **changes: object) -> TrialRequest:
        task = self.task
        values = {"task_path": task.path, "task_id": task.task_id, "slug": task.slug, "bucket": task.bucket}
        return TrialRequest(**{**values, "world_dir": self.world, **changes})  # type: ignore[arg-type]


@pytest.fixture
def setup(
    engine: ScriptedEngine, scratch: Path, sample_set: tuple[Path, Path], tiny_model: Path, tmp_path: Path
) -> Setup:
    return Setup(engine, scratch, sample_set, tiny_model, tmp_path)


async def test_a_trial_from_task_to_reward(setup: Setup) -> None:
    report = await setup.runner().run(setup.request(phase="train", step=4, repetition=2))
    assert report.outcome.kind is OutcomeKind.ANSWER, report.outcome.detail
    assert report.reward == 1.0
    assert report.turns == 2 and report.tool_calls == 1 and report.tool_failures == 0
    assert report.criteria and all(value == 1.0 for value in report.criteria.values())
    messages = json.loads(report.trajectory_path.read_text())["messages"]
    assert messages[-1] == {"role": "assistant", "content": ANSWER}
    assert "Tom Reyes" in messages[-2]["content"]  # what the tool returned
    ledger = TokenLedger.from_bytes(report.tokens_path.read_bytes())
    sampled = [i for span in ledger.spans if span.kind == "generation" for i in ledger.ids[span.start : span.end]]
    assert sampled == [i for i, m in zip(ledger.ids, ledger.loss_mask, strict=True) if m]
    # What the engine was asked to continue is, each time, exactly what the ledger held.
    for request, span in zip(setup.engine.requests, [s for s in ledger.spans if s.kind == "generation"], strict=True):
        assert request["prompt"] == ledger.ids[: span.start]
    line = json.loads((setup.out / "trials.jsonl").read_text())
    assert line["reward"] == 1.0 and line["outcome"] == "answer" and line["step"] == 4 and line["repetition"] == 2


async def test_many_at_once_keep_apart(setup: Setup) -> None:
    runner = setup.runner(max_concurrent=6, starts_per_second=50)
    reports = await asyncio.gather(*(runner.run(setup.request(repetition=i)) for i in range(6)))
    assert [r.repetition for r in reports] == list(range(6))
    assert [r.outcome.kind for r in reports] == [OutcomeKind.ANSWER] * 6, [r.outcome.detail for r in reports]
    assert len({r.path for r in reports}) == 6


async def test_the_cap_on_trials_at_once_holds(setup: Setup) -> None:
    setup.engine.delay_s = 0.2
    runner = setup.runner(max_concurrent=2, starts_per_second=100)
    seen: list[int] = []

    async def watch() -> None:
        while True:
            seen.append(len(live_sandboxes(setup.scratch)))
            await asyncio.sleep(0.02)

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(runner.run(setup.request(repetition=i)) for i in range(4)))
    watcher.cancel()
    assert max(seen) == 2


async def fails_with(setup: Setup, kind: OutcomeKind, **changes: object) -> TrialReport:
    request = changes.pop("request", None) or setup.request()
    report = await setup.runner(**changes).run(request)  # type: ignore[arg-type]
    assert report.outcome.kind is kind, report.outcome
    assert report.reward is None
    assert report.outcome.detail
    return report


async def test_an_engine_that_is_down_is_the_engines_failure(setup: Setup) -> None:
    setup.engine.status = 503
    report = await fails_with(setup, OutcomeKind.ENGINE_UNAVAILABLE, retries=1)
    assert report.attempt == 1  # tried again in a fresh sandbox


async def test_an_engine_without_token_ids_is_not_tried_again(setup: Setup) -> None:
    setup.engine.answer_with = {"token_ids": None}
    report = await fails_with(setup, OutcomeKind.ENGINE_PROTOCOL, retries=1)
    assert report.attempt == 0


async def test_a_world_without_a_declared_server_never_lowers_a_score(setup: Setup, tmp_path: Path) -> None:
    world = tmp_path / "world"
    shutil.copytree(setup.world, world)
    config = world / "app" / "tools" / "mcp.json"
    declared = json.loads(config.read_text())
    declared["mcpServers"]["calendar"] = {}
    config.write_text(json.dumps(declared))
    report = await fails_with(
        setup, OutcomeKind.WORLD_NOT_READY, request=setup.request(world_dir=world), agent={"world_timeout_s": 2.0}
    )
    assert "calendar" in report.outcome.detail


async def test_a_broken_grader_is_not_a_zero(setup: Setup, tmp_path: Path) -> None:
    task = tmp_path / "task"
    shutil.copytree(setup.task.path, task)
    (task / "tests" / "verifiers.json").write_text('[{"verifier_id": 1')
    report = await fails_with(setup, OutcomeKind.GRADING_FAILED, request=setup.request(task_path=task))
    assert "verifiers.json" in report.outcome.detail


async def test_a_slow_model_times_out_without_reward(setup: Setup) -> None:
    setup.engine.delay_s = 30
    await fails_with(setup, OutcomeKind.TIMEOUT, agent_timeout_s=1.5)


async def test_a_missing_task_directory_is_reported_and_not_raised(setup: Setup, tmp_path: Path) -> None:
    report = await setup.runner().run(setup.request(task_path=tmp_path / "nowhere"))
    assert report.outcome.rule.error and report.reward is None


async def test_a_turn_over_the_cap_earns_zero_and_keeps_its_tokens(setup: Setup) -> None:
    setup.engine.script = lambda prompt: "on and on " * 100
    report = await setup.runner(agent={"max_turn_tokens": 30}).run(setup.request())
    assert report.outcome.kind is OutcomeKind.LENGTH
    assert report.reward == 0.0
    assert TokenLedger.from_bytes(report.tokens_path.read_bytes()).sampled == 30


async def test_cancelling_stops_the_sandbox_before_it_returns(setup: Setup) -> None:
    setup.engine.delay_s = 30
    trial = asyncio.create_task(setup.runner().run(setup.request()))
    deadline = time.monotonic() + 20
    while not setup.engine.requests and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert len(live_sandboxes(setup.scratch)) == 1
    trial.cancel()
    with pytest.raises(asyncio.CancelledError):
        await trial
    assert live_sandboxes(setup.scratch) == []
