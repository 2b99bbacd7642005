"""What a judge is: one criterion in, a verdict or a typed failure out.

Model: a trial is graded criterion by criterion. `Judge` is the seam between the offline checks that ship
inside a task and an LLM judge; both see the same `JudgeRequest`.

Invariants
- A judge never raises for what it could not judge: it returns `JudgeFailure`, which no caller may turn
  into a score. Only cancellation and programming errors propagate.
- `score` already takes negation into account; `is_criteria_true` states the raw truth of the criterion.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from deskrl.grading import standalone

DEFAULT_FILE_TYPE = "All output (modified files and final message in console)"


@dataclass(frozen=True)
class JudgeRequest:
    """One criterion and the evidence for it.

    `verifier` is the entry of verifiers.json; `filesystem` the directory of the world's files after the
    run (None when the final answer is the only evidence); `changes` describes files that changed, as text.
    """

    verifier: Mapping[str, Any]
    final_answer: str
    instruction: str = ""
    filesystem: Path | None = None
    changes: str = ""
    expected_file_type: str = DEFAULT_FILE_TYPE
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def verifier_id(self) -> str:
        """The criterion's id."""
        return str(self.verifier.get("verifier_id", ""))


@dataclass(frozen=True)
class Verdict:
    """A judged criterion. `score` is in [0, 1]; `judge` names the judge and, for a model, its version."""

    verifier_id: str
    criteria: str
    is_criteria_true: bool
    score: float
    rationale: str
    judge: str
    is_primary_objective: bool = False


@dataclass(frozen=True)
class JudgeFailure:
    """A criterion that could not be judged. `retryable` says whether asking again can help."""

    verifier_id: str
    kind: str
    message: str
    judge: str
    retryable: bool = False


class Judge(Protocol):
    """Judges criteria. `label` goes into grading.json."""

    @property
    def label(self) -> str:
        """Name of the judge."""
        ...

    async def judge(self, request: JudgeRequest) -> Verdict | JudgeFailure:
        """Judge one criterion."""
        ...


class OfflineJudge:
    """The deterministic checks of the stand-alone grader, behind the `Judge` protocol."""

    @property
    def label(self) -> str:
        """Name of the judge."""
        return standalone.JUDGE

    async def judge(self, request: JudgeRequest) -> Verdict | JudgeFailure:
        """Judge one criterion in a thread: a pattern may take seconds."""
        return await asyncio.to_thread(self._judge, request)

    def _judge(self, request: JudgeRequest) -> Verdict | JudgeFailure:
        try:
            (criterion,) = standalone.parse_verifiers([dict(request.verifier)])
            checks = [c for c in (criterion.offline, criterion.offline_negative) if c is not None]
            if request.filesystem is None and any(c["kind"] == "file_exists" for c in checks):
                raise standalone.GradingFailure("filesystem_missing", "a file check needs the world's files")
            root = str(request.filesystem) if request.filesystem is not None else ""
            entry = standalone.judge_criterion(criterion, request.final_answer, root)
        except standalone.GradingFailure as failure:
            return JudgeFailure(request.verifier_id, failure.kind, failure.message, self.label)
        return Verdict(
            verifier_id=entry["verifier_id"],
            criteria=entry["criteria"],
            is_criteria_true=entry["is_criteria_true"],
            score=entry["score"],
            rationale=entry["rationale"],
            judge=self.label,
            is_primary_objective=entry["is_primary_objective"],
        )


def reward_of(verdicts: list[Verdict]) -> dict[str, float]:
    """Return the flat rewards of judged criteria, as in reward.json. Raises `ValueError` if empty."""
    if not verdicts:
        raise ValueError("no verdicts: a reward needs at least one judged criterion")
    return standalone.rewards_of([{"verifier_id": v.verifier_id, "score": v.score} for v in verdicts])
