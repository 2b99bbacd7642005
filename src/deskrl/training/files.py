"""The run folder: names of what lies in it, making one, reading its metrics. Imports nothing of weight."""

import json
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.yaml"
ERROR_FILE = "error.json"
LOG_FILE = "logs/train.log"
METRICS_FILE = "metrics.jsonl"
CHECKPOINTS = "checkpoints"

LOGPROB_GAP = "eval/logprob_abs_diff_mean"
"""Metric: mean |trainer's logprob - engine's| over fresh samples, after the last weight sync."""


class RunFolderError(RuntimeError):
    """The run folder cannot be written; the message says where, why and what to do."""


def make_run_folder(run_dir: Path) -> None:
    """Make the folder with its logs, and prove that data can be written there.

    Raises RunFolderError: no permission, a read-only or full disk, a file in the way.
    """
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        probe = run_dir / ".write-test"
        probe.write_bytes(b"x" * 65536)
        probe.unlink()
    except OSError as error:
        raise RunFolderError(
            f"the run folder {run_dir} cannot be written ({error.strerror}): choose another generator.desk.run_dir"
        ) from error


def read_metrics(run_dir: Path) -> dict[int, dict[str, Any]]:
    """All metrics of a run by step, lines of one step merged in order; empty without the file."""
    steps: dict[int, dict[str, Any]] = {}
    try:
        lines = (run_dir / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return steps
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was killed while it wrote
        steps.setdefault(int(record["step"]), {}).update(record)
    return steps
