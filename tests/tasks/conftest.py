"""A fresh sound task per test, to be broken in one place."""

from __future__ import annotations

from pathlib import Path

import pytest

from deskrl.worlds.sample_tasks import SAMPLE_TASKS, task_files


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A copy of the first sample task."""
    path = tmp_path / "tasks" / "one"
    for name, text in task_files(SAMPLE_TASKS[0], 1).items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text, encoding="utf-8")
    return path
