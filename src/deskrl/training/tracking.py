"""A run's metrics: one line of JSON a step in `metrics.jsonl`, besides whatever tracker SkyRL is told to use.

Invariant: a step logged twice (before and after an evaluation) gives two lines with the same step; readers
merge them. Values that are not finite are written as null: JSON has no NaN.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl.train.utils.tracking import Tracking

from deskrl.training.files import METRICS_FILE
from deskrl.trials.progress import Progress


class RunTracking(Tracking):
    """SkyRL's tracker that also writes the run folder's metrics and progress."""

    def __init__(self, run_dir: Path, progress: Progress, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._path = run_dir / METRICS_FILE
        self._progress = progress

    def log(self, data: Mapping[str, Any], step: int, commit: bool = False) -> None:
        """Writes one step's metrics. Raises OSError when the folder cannot be written."""
        super().log(data, step, commit)
        numbers = {key: _number(value) for key, value in data.items() if _is_number(value)}
        with self._path.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps({"step": step, "time": time.time(), **numbers}) + "\n")
        self._progress.note(step=step)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or hasattr(value, "item")


def _number(value: Any) -> float | int | None:
    plain = value.item() if hasattr(value, "item") else value
    return plain if isinstance(plain, int) or math.isfinite(plain) else None
