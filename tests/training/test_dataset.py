"""Rows are tasks, named by their ids and not by where they stand."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deskrl.tasks.problems import TaskFormatError
from deskrl.training.dataset import TaskDataset, TaskSetError, load_tasks


def test_rows_as_skyrl_reads_them(sample_set: tuple[Path, Path]) -> None:
    from skyrl.train.generators.utils import prepare_generator_input

    dataset = TaskDataset(load_tasks([sample_set[0]]))
    rows = dataset.collate_fn([dataset[0], dataset[1]])
    batch, uids = prepare_generator_input(rows, 3, {"temperature": 1.0}, "unused", "train", 5)
    first, second = dataset.tasks[:2]
    assert uids == [first.task_id] * 3 + [second.task_id] * 3
    assert [t.repetition_id for t in batch["trajectory_ids"]] == [0, 1, 2, 0, 1, 2]
    assert batch["env_extras"][3]["task_id"] == second.task_id
    assert batch["prompts"][0][0]["content"] == first.instruction


def test_a_uid_does_not_depend_on_the_position(sample_set: tuple[Path, Path]) -> None:
    tasks = load_tasks([sample_set[0]])
    forwards, backwards = TaskDataset(tasks), TaskDataset(tasks[::-1])
    uids = {forwards[i]["uid"] for i in range(len(forwards))}
    assert uids == {backwards[i]["uid"] for i in range(len(backwards))} == {task.task_id for task in tasks}


def test_sets_that_cannot_be_used(sample_set: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(TaskSetError, match="no such task directory"):
        load_tasks([tmp_path / "nowhere"])
    with pytest.raises(TaskSetError, match="holds no task"):
        load_tasks([tmp_path])
    with pytest.raises(TaskSetError, match="empty"):
        TaskDataset([])
    one = sorted(path for path in sample_set[0].iterdir() if (path / "task.toml").exists())[0]
    for name in ("a", "b"):
        shutil.copytree(one, tmp_path / name)
    with pytest.raises(TaskSetError, match="the same task_id"):
        TaskDataset(load_tasks([tmp_path]))
    (tmp_path / "a" / "archipelago.json").write_text("{")
    with pytest.raises(TaskFormatError, match=r"archipelago\.json"):
        load_tasks([tmp_path])
