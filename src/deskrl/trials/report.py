"""What is kept of a finished trial in memory: a small object with paths, never the tokens themselves."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deskrl.agent.files import TOKENS_FILE, TRAJECTORY_FILE
from deskrl.trials.outcome import Outcome


@dataclass(frozen=True)
class TrialReport:
    """A finished trial. `reward` is None where the outcome has none; times in seconds."""

    name: str
    task_id: str
    bucket: str
    phase: str
    step: int | None
    repetition: int
    attempt: int
    outcome: Outcome
    reward: float | None
    criteria: dict[str, float]
    path: Path
    seconds: float
    turns: int = 0
    tokens: int = 0
    tool_calls: int = 0
    tool_failures: int = 0
    model_seconds: float = 0.0
    tool_seconds: float = 0.0
    times: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_path(self) -> Path:
        """The token ledger's file; absent when no prompt was ever rendered."""
        return self.path / "agent" / TOKENS_FILE

    @property
    def trajectory_path(self) -> Path:
        """The conversation's file."""
        return self.path / "agent" / TRAJECTORY_FILE

    def to_json(self) -> str:
        """One line for trials.jsonl."""
        record: dict[str, Any] = asdict(self)
        record["outcome"] = self.outcome.kind.value
        record["detail"] = self.outcome.detail[:500]
        record["path"] = str(self.path)
        return json.dumps(record, ensure_ascii=False)
