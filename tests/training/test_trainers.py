"""SkyRL 0.3.0's mislabelled last checkpoint, shown, and the overrides that mend it and guard the update."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer
from skyrl.train.trainer import RayPPOTrainer

from deskrl.training.trainers import AsyncTrainer, SyncTrainer, TrialsFailedError


class Saved:
    """Stands for the dispatch, the loader and the tokenizer of a trainer whose save is looked at."""

    def save_checkpoint(self, *_: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def get_node_ids(self) -> list[str]:
        return []

    def get_consumed_uids_list(self) -> list[str]:
        return []

    get_filtered_uids_list = get_consumed_uids_list


def trainer_after_its_loop(kind: type, path: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A trainer as SkyRL's loop leaves it after 3 of 3 steps: the step counter is one beyond."""
    from skyrl.train import trainer as module

    # SkyRL's own clean-up would start Ray tasks; the file names are what is looked at here.
    monkeypatch.setattr(module, "run_on_each_node", lambda *_: None)
    from deskrl.training.config import build

    trainer = object.__new__(kind)
    trainer.cfg = build({"trainer": {"ckpt_path": path, "max_ckpts_to_keep": 2}})
    trainer.dispatch = trainer.train_dataloader = trainer.async_train_dataloader = Saved()
    trainer.tokenizer, trainer.all_timings, trainer._node_ids, trainer.epoch = None, {}, [], 0
    trainer.total_training_steps, trainer.global_step = 3, 4
    return trainer


def saved_step(path: str) -> int:
    from pathlib import Path

    state = torch.load(Path(path, "global_step_" + latest(path), "trainer_state.pt"), weights_only=False)
    assert str(state["global_step"]) == latest(path)
    return int(latest(path))


def latest(path: str) -> str:
    from pathlib import Path

    return Path(path, "latest_ckpt_global_step.txt").read_text()


def test_skyrl_labels_the_last_checkpoint_one_step_too_far(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_after_its_loop(FullyAsyncRayPPOTrainer, str(tmp_path), monkeypatch)
    trainer.save_checkpoints()
    # If this fails, SkyRL has mended it: remove the override.
    assert saved_step(str(tmp_path)) == 4


def test_ours_labels_it_with_the_step_that_was_trained(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_after_its_loop(AsyncTrainer, str(tmp_path), monkeypatch)
    trainer.save_checkpoints()
    assert saved_step(str(tmp_path)) == 3
    assert trainer.global_step == 4  # the loop's own count is not touched


def test_a_checkpoint_within_the_loop_keeps_its_label(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_after_its_loop(AsyncTrainer, str(tmp_path), monkeypatch)
    for trainer.global_step in (1, 2, 3):
        trainer.save_checkpoints()
        assert saved_step(str(tmp_path)) == trainer.global_step
    assert sorted(p.name for p in tmp_path.glob("global_step_*")) == ["global_step_2", "global_step_3"]


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []

    def record(self: Any, data: Any) -> dict[str, float]:
        seen.append(data)
        return {"loss": 1.0}

    monkeypatch.setattr(RayPPOTrainer, "train_critic_and_policy", record)
    return seen


def trainer_with(metrics: dict[str, Any]) -> Any:
    trainer = object.__new__(SyncTrainer)
    trainer.all_metrics = metrics
    trainer.cfg = SimpleNamespace()
    return trainer


def test_a_batch_with_a_signal_is_trained_on(updates: list[Any]) -> None:
    trainer = trainer_with({"trials/count": 4, "trials/masked": 2})
    assert trainer.train_critic_and_policy({"loss_mask": torch.tensor([[0, 1]])}) == {"loss": 1.0}
    assert len(updates) == 1 and trainer.all_metrics["policy/update_skipped"] == 0


def test_equal_rewards_leave_the_weights_alone(updates: list[Any]) -> None:
    trainer = trainer_with({"trials/count": 4, "trials/masked": 0})
    assert trainer.train_critic_and_policy({"loss_mask": torch.zeros(2, 3)}) == {}
    assert updates == [] and trainer.all_metrics["policy/update_skipped"] == 1


def test_a_batch_of_failures_stops_the_run_with_the_reasons(updates: list[Any]) -> None:
    trainer = trainer_with({"trials/count": 4, "trials/masked": 4, "outcomes/grading_failed": 3, "outcomes/answer": 1})
    with pytest.raises(TrialsFailedError, match="3 x grading_failed"):
        trainer.train_critic_and_policy({"loss_mask": torch.zeros(2, 3)})
    assert updates == []
