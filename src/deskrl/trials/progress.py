"""What a run is doing right now, for whoever watches it from another process.

`progress.json` is replaced at most every 0.3 s and holds the counters; `trials.jsonl` gets one line per
finished trial. A disk that refuses the counters must not stop a trial, but one that refuses the trial log is
reported: that line is a result.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from deskrl.trials.report import TrialReport

PROGRESS_FILE = "progress.json"
TRIALS_FILE = "trials.jsonl"
_INTERVAL_S = 0.3


class Progress:
    """Counters of one run folder."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / PROGRESS_FILE
        self._log = run_dir / TRIALS_FILE
        self._written = 0.0
        self._state: dict[str, Any] = {"phase": "", "step": None, "started_at": time.time()}
        self._running = 0
        self._outcomes: Counter[str] = Counter()
        self._rewards = (0, 0.0)
        self._tokens = 0

    def note(self, **values: Any) -> None:
        """Sets free-form state (phase, step)."""
        self._state.update(values)
        self._write(force=True)

    def started(self) -> None:
        """A trial began."""
        self._running += 1
        self._write()

    def ended(self) -> None:
        """A trial left, however it ended."""
        self._running -= 1
        self._write()

    def finished(self, report: TrialReport) -> None:
        """A trial has its report. Raises OSError when trials.jsonl cannot be written."""
        self._outcomes[report.outcome.kind.value] += 1
        self._tokens += report.tokens
        if report.reward is not None:
            count, total = self._rewards
            self._rewards = (count + 1, total + report.reward)
        with self._log.open("a", encoding="utf-8") as handle:
            handle.write(report.to_json() + "\n")
        self._write()

    def _write(self, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._written < _INTERVAL_S:
            return
        self._written = now
        graded, total = self._rewards
        state = {
            **self._state,
            "running": self._running,
            "outcomes": dict(self._outcomes),
            "graded": graded,
            "mean_reward": total / graded if graded else None,
            "tokens": self._tokens,
            "updated_at": time.time(),
        }
        draft = self._path.with_suffix(".part")
        with contextlib.suppress(OSError):
            draft.write_text(json.dumps(state))
            os.replace(draft, self._path)
