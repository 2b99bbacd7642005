"""What SkyRL gets from a batch of trials, whatever became of them; nothing is ever raised into SkyRL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from skyrl.train.generators.base import BatchMetadata, TrajectoryID
from skyrl.train.generators.utils import concatenate_generator_outputs
from skyrl.train.utils.trainer_utils import validate_generator_output

from deskrl.tasks.schema import Task
from deskrl.tokens import TokenLedger
from deskrl.training.dataset import load_tasks
from deskrl.training.generator import GeneratorRules, TrialGenerator
from deskrl.trials.outcome import Outcome, OutcomeKind, reward_of
from deskrl.trials.report import TrialReport
from deskrl.trials.runner import TrialRequest

PAD = 0
Plan = Callable[[TrialRequest], OutcomeKind | BaseException]


class PlannedRunner:
    """Stands where TrialRunner does (its own tests run real trials): ends each trial as planned."""

    def __init__(self, out: Path, plan: Plan) -> None:
        self.out, self.plan = out, plan
        self.requests: list[TrialRequest] = []
        self.cancelled = 0

    async def run(self, request: TrialRequest) -> TrialReport:
        self.requests.append(request)
        end = self.plan(request)
        if isinstance(end, asyncio.CancelledError):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if isinstance(end, BaseException):
            raise end
        path = self.out / f"{request.task_id}-{request.repetition}"
        (path / "agent").mkdir(parents=True)
        ledger = TokenLedger(1000)
        ledger.append_prompt([1, 2, 3])
        if end is not OutcomeKind.WORLD_NOT_READY:
            ledger.append_generation(
                [10 + request.repetition, 11], [-0.5, -0.25], weight_version_start=1, weight_version_end=1
            )
            ledger.append_close([4])
            ledger.append_observation([5, 6])
            ledger.append_generation([12], [-1.0], weight_version_start=1, weight_version_end=2)
            ledger.append_close([4])
            (path / "agent" / "tokens.npz").write_bytes(ledger.to_bytes())
        outcome = Outcome(end)
        return TrialReport(
            name=path.name, task_id=request.task_id, bucket="other", phase=request.phase, step=request.step,
            repetition=request.repetition, attempt=0, outcome=outcome,
            reward=reward_of(outcome, request.repetition / 4), criteria={}, path=path, seconds=1.5, turns=2,
        )  # fmt: skip


@pytest.fixture
def tasks(sample_set: tuple[Path, Path]) -> list[Task]:
    return load_tasks([sample_set[0]])[:2]


def batch(tasks: list[Task], samples: int = 3, phase: str = "train") -> Any:
    ids = [TrajectoryID(task.task_id, i) for task in tasks for i in range(samples)]
    return {
        "prompts": [[{"role": "user", "content": "x"}]] * len(ids),
        "env_classes": ["deskrl"] * len(ids),
        "env_extras": [{"task_id": t.instance_id, "data_source": "other"} for t in ids],
        "sampling_params": {"temperature": 0.7, "max_tokens": 99, "skip_special_tokens": True, "stop": None},
        "trajectory_ids": ids,
        "batch_metadata": BatchMetadata(global_step=3, training_phase=phase),
    }


def make(tmp_path: Path, tasks: list[Task], plan: Plan, **rules: Any) -> tuple[TrialGenerator, PlannedRunner]:
    runner = PlannedRunner(tmp_path, plan)
    return TrialGenerator(runner, tasks, Path("/worlds"), PAD, GeneratorRules(**rules)), runner  # type: ignore[arg-type]


async def test_ids_mask_and_logprobs_are_the_ledgers(tmp_path: Path, tasks: list[Task]) -> None:
    generator, runner = make(tmp_path, tasks, lambda _: OutcomeKind.ANSWER)
    output = await generator.generate(batch(tasks))
    validate_generator_output(6, output)
    assert output["prompt_token_ids"] == [[1, 2, 3]] * 6
    assert output["response_ids"] == [[10 + i, 11, 4, 5, 6, 12] for _ in tasks for i in range(3)]
    assert output["loss_masks"] == [[1, 1, 0, 0, 0, 1]] * 6
    assert output["rollout_logprobs"] == [[-0.5, -0.25, 0.0, 0.0, 0.0, -1.0]] * 6
    assert output["rewards"] == [i / 4 for _ in tasks for i in range(3)]
    request = runner.requests[1]
    assert dict(request.sampling) == {"temperature": 0.7} and request.max_turn_tokens == 99
    assert (request.phase, request.step, request.repetition) == ("train", 3, 1)
    assert request.world_dir == Path("/worlds") / tasks[0].world_id


async def test_every_kind_of_end_gives_a_batch_that_skyrl_takes(tmp_path: Path, tasks: list[Task]) -> None:
    for kind in OutcomeKind:
        generator, _ = make(
            tmp_path / kind, tasks, lambda request, kind=kind: kind if request.repetition else OutcomeKind.ANSWER
        )  # type: ignore[misc]
        output = await generator.generate(batch(tasks))
        validate_generator_output(6, output)
        concatenate_generator_outputs([output, output])
        assert output["rollout_metrics"][f"outcomes/{kind.value}"] >= 2


async def test_an_error_masks_its_group_and_no_other(tmp_path: Path, tasks: list[Task]) -> None:
    bad = tasks[0].task_id

    def plan(request: TrialRequest) -> OutcomeKind:
        failed = request.task_id == bad and request.repetition == 1
        return OutcomeKind.WORLD_NOT_READY if failed else OutcomeKind.ANSWER

    generator, _ = make(tmp_path, tasks, plan)
    output = await generator.generate(batch(tasks))
    assert [any(mask) for mask in output["loss_masks"]] == [False] * 3 + [True] * 3
    assert output["response_ids"][1] == [PAD]  # SkyRL cannot take an empty response
    assert output["rewards"][1] == pytest.approx((0 / 4 + 2 / 4) / 2)  # the group's mean, not 0
    assert output["rollout_metrics"]["trials/masked"] == 3


@pytest.mark.parametrize("error", [RuntimeError("a bug"), OSError(28, "disk full"), KeyError("x"), MemoryError()])
async def test_nothing_a_trial_raises_reaches_skyrl(tmp_path: Path, tasks: list[Task], error: BaseException) -> None:
    def plan(request: TrialRequest) -> OutcomeKind | BaseException:
        return error if request.repetition == 0 else OutcomeKind.ANSWER

    generator, _ = make(tmp_path, tasks, plan)
    output = await generator.generate(batch(tasks))
    validate_generator_output(6, output)
    assert not any(any(mask) for mask in output["loss_masks"])
    assert output["stop_reasons"].count("unexpected") == 2


async def test_an_unreadable_ledger_is_a_failure_and_not_an_empty_trial(tmp_path: Path, tasks: list[Task]) -> None:
    generator, runner = make(tmp_path, tasks, lambda _: OutcomeKind.ANSWER)
    run = runner.run

    async def damaging(request: TrialRequest) -> TrialReport:
        report = await run(request)
        if request.repetition == 0:
            report.tokens_path.write_bytes(b"not a ledger")
        return report

    runner.run = damaging  # type: ignore[method-assign]
    output = await generator.generate(batch(tasks[:1]))
    assert output["stop_reasons"] == ["unexpected", "answer", "answer"]
    assert not any(any(mask) for mask in output["loss_masks"])


async def test_cancelling_waits_for_every_trial_to_stop(tmp_path: Path, tasks: list[Task]) -> None:
    generator, runner = make(tmp_path, tasks, lambda _: asyncio.CancelledError())
    running = asyncio.create_task(generator.generate(batch(tasks)))
    while len(runner.requests) < 6:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert runner.cancelled == 6


async def test_only_samples_of_one_weight_version_are_kept_to_compare(tmp_path: Path, tasks: list[Task]) -> None:
    generator, _ = make(tmp_path, tasks, lambda _: OutcomeKind.ANSWER)
    await generator.generate(batch(tasks, phase="eval"))
    assert len(generator.probe) == 0  # the planned ledgers go from version 1 to 2
