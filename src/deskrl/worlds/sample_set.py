"""The sample tasks and their world, side by side in one folder: `tasks/<task>` and `worlds/<world id>`."""

from __future__ import annotations

from pathlib import Path

from deskrl.worlds.sample import build_sample_world
from deskrl.worlds.sample_tasks import WORLD_ID, build_sample_tasks


def build_sample_set(out: Path) -> tuple[Path, Path]:
    """Write (or reuse) both; returns the folder of tasks and the folder of worlds. Raises OSError, ValueError."""
    tasks, worlds = out / "tasks", out / "worlds"
    build_sample_tasks(tasks)
    build_sample_world(worlds / WORLD_ID)
    return tasks, worlds
