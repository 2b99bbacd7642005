"""The other experiments through the command line: synchronous training, evaluation only, a dry run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import Deskrl

pytestmark = pytest.mark.e2e


def finished(tmp_path: Path, *arguments: str) -> tuple[Path, dict[int, dict[str, Any]]]:
    run = tmp_path / "run"
    common = [f"generator.desk.run_dir={run}", "generator.desk.model=tiny", "generator.n_samples_per_prompt=2"]
    deskrl = Deskrl([*arguments, *common], tmp_path)
    code = deskrl.wait(900)
    assert code == 0, deskrl.text()
    assert deskrl.leftovers() == []
    metrics: dict[int, dict[str, Any]] = {}
    path = run / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        record = json.loads(line)
        metrics.setdefault(record["step"], {}).update(record)
    return run, metrics


def test_one_synchronous_step(tmp_path: Path) -> None:
    overrides = ["trainer.fully_async.enabled=false", "trainer.max_training_steps=1"]
    run, metrics = finished(tmp_path, "train", "smoke-cpu", *overrides)
    assert metrics[1]["trials/count"] == 4
    assert (run / "checkpoints" / "latest_ckpt_global_step.txt").read_text() == "1"


def test_evaluation_with_a_preset(tmp_path: Path) -> None:
    run, metrics = finished(tmp_path, "eval", "--preset", "smoke-cpu")
    assert 0 <= metrics[0]["eval/all/avg_score"] <= 1
    trials = [json.loads(line) for line in (run / "trials.jsonl").read_text().splitlines()]
    assert len(trials) == 12 and {trial["phase"] for trial in trials} == {"eval"}
    assert not (run / "checkpoints").exists()


def test_a_dry_run_checks_and_starts_nothing(tmp_path: Path) -> None:
    run, metrics = finished(tmp_path, "train", "smoke-cpu", "--dry-run", "trainer.seed=77")
    assert metrics == {} and not (run / "trials").exists()
    assert "seed: 77" in (run / "config.yaml").read_text()
