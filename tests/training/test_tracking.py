"""metrics.jsonl: every line is JSON, lines of one step merge, a torn last line loses nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from deskrl.training.files import read_metrics
from deskrl.training.tracking import RunTracking
from deskrl.trials.progress import Progress


def test_metrics_of_a_step_are_merged_and_bad_numbers_are_null(tmp_path: Path) -> None:
    tracker = RunTracking(tmp_path, Progress(tmp_path), "p", "e", backend="console")
    tracker.log({"a": 1, "b": np.float32(0.5), "c": torch.tensor(2.0), "text": "no"}, step=1)
    tracker.log({"a": float("nan"), "d": True}, step=1, commit=True)
    tracker.log({"a": 3}, step=2)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len([json.loads(line) for line in lines]) == 3
    metrics = read_metrics(tmp_path)
    assert metrics[1]["b"] == 0.5 and metrics[1]["c"] == 2.0 and metrics[1]["a"] is None
    assert "text" not in metrics[1] and metrics[2]["a"] == 3
    with (tmp_path / "metrics.jsonl").open("a") as handle:
        handle.write('{"step": 3, "a"')
    assert set(read_metrics(tmp_path)) == {1, 2}
    assert json.loads((tmp_path / "progress.json").read_text())["step"] == 2


def test_no_metrics_yet(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == {}
