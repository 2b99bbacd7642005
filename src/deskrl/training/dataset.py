"""SkyRL's dataset over task directories: one row per task.

Differences from SkyRL's own PromptDataset: nothing is tokenised ahead (the world's tools belong to the
prompt and are known only once it runs), and a row's uid is the task's id, not its position, so that adding
or reordering tasks cannot make a resume skip or repeat the wrong ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from deskrl.tasks.load import find_tasks, load_task
from deskrl.tasks.schema import Task


class Row(TypedDict):
    """What SkyRL's `prepare_generator_input` reads."""

    prompt: list[dict[str, str]]
    env_class: str
    env_extras: dict[str, Any]
    uid: str


class TaskSetError(ValueError):
    """A set of tasks that cannot be used as a dataset."""


class TaskDataset:
    """Tasks in the order given. Raises TaskSetError when empty or when two tasks share an id."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        if not tasks:
            raise TaskSetError("the task set is empty")
        seen: dict[str, Task] = {}
        for task in tasks:
            if task.task_id in seen:
                raise TaskSetError(f"{task.path} and {seen[task.task_id].path} have the same task_id {task.task_id!r}")
            seen[task.task_id] = task
        self.tasks = list(tasks)

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: int) -> Row:
        task = self.tasks[index]
        return Row(
            prompt=[{"role": "user", "content": task.instruction}],
            env_class="deskrl",
            env_extras={"task_id": task.task_id, "data_source": task.bucket},
            uid=task.task_id,
        )

    @staticmethod
    def collate_fn(rows: list[Row]) -> list[Row]:
        """SkyRL's batches are lists of rows."""
        return rows


def load_tasks(sources: Sequence[str | Path]) -> list[Task]:
    """The tasks at or below the given directories, in the order of sources and then of paths.

    Raises TaskSetError for a source without tasks, TaskFormatError for the first task that is not usable.
    """
    tasks: list[Task] = []
    for source in sources:
        path = Path(source).expanduser()
        if not path.is_dir():
            raise TaskSetError(f"{path}: no such task directory")
        found = find_tasks(path)
        if not found:
            raise TaskSetError(f"{path} holds no task (no task.toml at or below it)")
        tasks.extend(load_task(folder) for folder in found)
    return tasks
