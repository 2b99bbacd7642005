"""SkyRL's generator: a batch of prompts in, harbor trials run, trajectories out.

Invariants: `generate` raises CancelledError only (SkyRL's async worker ends the whole process on any other
exception); what goes wrong becomes masked trajectories and counted outcomes. Every list has one entry for
each prompt, in order. Ids, mask and logprobs come from the token ledger and are passed on untouched.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput

from deskrl.tasks.schema import Task
from deskrl.tokens import TokenLedgerError
from deskrl.training.masking import TIMEOUT_THRESHOLD, Verdict, judge_group
from deskrl.training.trajectory import Trajectory, placeholder, read_trajectory
from deskrl.trials.outcome import Outcome, OutcomeKind
from deskrl.trials.report import TrialReport
from deskrl.trials.runner import TrialRequest, TrialRunner

PROBE_SIZE = 8

_log = logging.getLogger(__name__)

# What of SkyRL's sampling parameters an OpenAI-style completions request takes.
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class GeneratorRules:
    """How outcomes become training signal; see `deskrl.training.masking`."""

    timeout_threshold: int = TIMEOUT_THRESHOLD
    overlong_filtering: bool = False


class TrialGenerator(GeneratorInterface):
    """Runs one trial for each prompt of a batch.

    Args:
        runner: runs the trials.
        tasks: every task that can be asked for.
        worlds: folder of world folders named by world id; None when the environment brings its own worlds.
        pad_token_id: fills the response of a trial that sampled nothing.
    """

    def __init__(
        self,
        runner: TrialRunner,
        tasks: Sequence[Task],
        worlds: Path | None,
        pad_token_id: int,
        rules: GeneratorRules | None = None,
    ) -> None:
        self._runner = runner
        self._tasks = {task.task_id: task for task in tasks}
        self._worlds = worlds
        self._pad_token_id = pad_token_id
        self._rules = rules or GeneratorRules()
        self.probe: deque[Trajectory] = deque(maxlen=PROBE_SIZE)
        """Recent evaluation samples drawn from one version of the weights, to compare logprobs on."""

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """See the class. Raises CancelledError, once every trial of the batch has stopped its sandbox."""
        requests = self._requests(input_batch)
        trials = [asyncio.create_task(self._runner.run(request)) for request in requests]
        try:
            reports = list(await asyncio.gather(*trials))
        except asyncio.CancelledError:
            for trial in trials:
                trial.cancel()
            await asyncio.gather(*trials, return_exceptions=True)
            raise
        except Exception:  # the runner does not raise; if it does after all, the batch is lost, not the run
            _log.exception("a batch of %d trials failed as a whole", len(trials))
            settled = await asyncio.gather(*trials, return_exceptions=True)
            reports = [_as_report(r, q) for r, q in zip(settled, requests, strict=True)]
        trajectories = await asyncio.gather(*(self._trajectory(report) for report in reports))
        pairs = [
            (trajectory, report if problem is None else _broken(report, problem))
            for report, (trajectory, problem) in zip(reports, trajectories, strict=True)
        ]
        output = self._output(input_batch, [t for t, _ in pairs], [r for _, r in pairs])
        if requests and requests[0].phase == "eval":
            self.probe.extend(t for t, _ in pairs if any(t.mask) and len(set(t.weight_versions)) == 1)
        return output

    def _requests(self, input_batch: GeneratorInput) -> list[TrialRequest]:
        metadata = input_batch.get("batch_metadata")
        params: Mapping[str, Any] = input_batch.get("sampling_params") or {}
        sampling = {key: params[key] for key in _SAMPLING_KEYS if params.get(key) is not None}
        requests = []
        for extras, trajectory_id in zip(input_batch["env_extras"], input_batch["trajectory_ids"], strict=True):
            task = self._tasks[extras["task_id"]]
            requests.append(
                TrialRequest.of(
                    task,
                    self._worlds,
                    phase="eval" if metadata is None else metadata.training_phase,
                    step=None if metadata is None else metadata.global_step,
                    repetition=trajectory_id.repetition_id,
                    sampling=sampling,
                    max_turn_tokens=params.get("max_tokens"),
                )
            )
        return requests

    async def _trajectory(self, report: TrialReport) -> tuple[Trajectory, str | None]:
        try:
            return await asyncio.to_thread(read_trajectory, report.tokens_path, self._pad_token_id), None
        except (TokenLedgerError, OSError) as error:
            _log.error("trial %s: %s", report.name, error)
            return placeholder(self._pad_token_id), str(error)

    def _output(
        self, input_batch: GeneratorInput, trajectories: list[Trajectory], reports: list[TrialReport]
    ) -> GeneratorOutput:
        verdicts: list[Verdict | None] = [None] * len(reports)
        groups: dict[str, list[int]] = {}
        for index, trajectory_id in enumerate(input_batch["trajectory_ids"]):
            groups.setdefault(trajectory_id.instance_id, []).append(index)
        for members in groups.values():
            judged = judge_group(
                [reports[i] for i in members],
                timeout_threshold=self._rules.timeout_threshold,
                overlong_filtering=self._rules.overlong_filtering,
            )
            for index, verdict in zip(members, judged, strict=True):
                verdicts[index] = verdict
        final = [verdict for verdict in verdicts if verdict is not None]
        kept = [t if v.trained else t.masked() for t, v in zip(trajectories, final, strict=True)]
        return {
            "prompt_token_ids": [t.prompt_ids for t in kept],
            "response_ids": [t.response_ids for t in kept],
            "rewards": [v.reward for v in final],
            "loss_masks": [t.mask for t in kept],
            "stop_reasons": [r.outcome.kind.value for r in reports],
            "rollout_metrics": metrics(reports, final),
            "rollout_logprobs": [t.logprobs for t in kept],
            "trajectory_ids": input_batch["trajectory_ids"],
            "trajectory_generation_times": [r.seconds for r in reports],
            "rollout_expert_indices": None,
            "is_last_step": None,
            "env_metrics": None,
            "pixel_values": None,
            "image_grid_thw": None,
        }


def metrics(reports: Sequence[TrialReport], verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Numbers of one batch. SkyRL merges batches by name: `mean` is averaged, `min`/`max` kept, others summed."""
    rewards = [report.reward for report in reports if report.reward is not None]
    calls = sum(report.tool_calls for report in reports)
    result: dict[str, float] = {
        "trials/count": len(reports),
        "trials/masked": sum(not verdict.trained for verdict in verdicts),
        "trials/turns_mean": _mean([report.turns for report in reports]),
        "trials/tokens_mean": _mean([report.tokens for report in reports]),
        "trials/seconds_mean": _mean([report.seconds for report in reports]),
        "trials/tool_calls": calls,
        "trials/tool_failures": sum(report.tool_failures for report in reports),
    }
    if rewards:
        result["trials/graded_reward_mean"] = _mean(rewards)
        result["trials/pass_mean"] = _mean([float(reward >= 1.0) for reward in rewards])
    for kind, count in Counter(report.outcome.kind.value for report in reports).items():
        result[f"outcomes/{kind}"] = count
    return result


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _broken(report: TrialReport, problem: str) -> TrialReport:
    return replace(report, outcome=Outcome(OutcomeKind.UNEXPECTED, problem), reward=None)


def _as_report(settled: TrialReport | BaseException, request: TrialRequest) -> TrialReport:
    if isinstance(settled, TrialReport):
        return settled
    return TrialReport(
        name="lost",
        task_id=request.task_id,
        bucket=request.bucket,
        phase=request.phase,
        step=request.step,
        repetition=request.repetition,
        attempt=0,
        outcome=Outcome(OutcomeKind.UNEXPECTED, f"{type(settled).__name__}: {settled}"),
        reward=None,
        criteria={},
        path=Path("/nonexistent"),
        seconds=0.0,
    )
