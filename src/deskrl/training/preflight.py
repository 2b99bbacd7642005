"""Checks and preparations before a run starts anything expensive.

Order: the run folder can be written, there is room for its checkpoints, the tasks are sound, the sandboxes
work here, the hardware fits the engine, the model is there. Each failure is one message that says what to do.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from deskrl.cache import cache_dir
from deskrl.tasks.schema import Task
from deskrl.training.dataset import load_tasks
from deskrl.training.files import CHECKPOINTS, make_run_folder

if TYPE_CHECKING:
    from skyrl.train.config import SkyRLTrainConfig

SAMPLE = "sample"
_BYTES_PER_PARAMETER = 16
"""Of a checkpoint: float32 weights and two optimizer moments, and the bf16 copy for Hugging Face."""
_MARGIN = 200 * 2**20


class PreflightError(RuntimeError):
    """The run cannot start; the message says why and what to do."""


def prepare(config: SkyRLTrainConfig, *, evaluate: bool = False) -> tuple[list[Task], list[Task]]:
    """Make `config` ready to run, in place: model path, run folders, sample tasks and worlds.

    Returns the tasks to train on (none with `evaluate`) and those to evaluate on.

    Raises PreflightError, RunFolderError, TaskSetError, TaskFormatError, ModelError, SandboxUnavailable, OSError.
    """
    desk = config.generator.desk
    run_dir = Path(desk.run_dir).absolute()
    make_run_folder(run_dir)
    _set_folders(config, run_dir)
    tasks = [] if evaluate else load_tasks(_sources(config, list(desk.tasks)))
    eval_tasks = load_tasks(_sources(config, list(desk.eval_tasks))) if desk.eval_tasks else []
    if not tasks and not eval_tasks:
        raise PreflightError(f"no tasks: set generator.desk.{'eval_tasks' if evaluate else 'tasks'}")
    _check_worlds(config, [*tasks, *eval_tasks])
    if desk.environment.endswith(":BubblewrapEnvironment"):
        from deskrl.sandbox.runtime import find_bwrap, require_tools

        find_bwrap()
        require_tools()
    _check_hardware(config)
    model = _prepare_model(config)
    if not evaluate:
        _check_space(run_dir, model, config.trainer.max_ckpts_to_keep)
    return tasks, eval_tasks


def _prepare_model(config: SkyRLTrainConfig) -> Path:
    """Make the model's directory and point SkyRL's keys at it; returns it. Raises PreflightError, ModelError."""
    from skyrl.train.config import PolicyConfig

    from deskrl.training.models import prepare_model

    desk, policy, ref = config.generator.desk, config.trainer.policy.model, config.trainer.ref.model
    model = prepare_model(desk.model or policy.path)
    if policy.path not in (PolicyConfig().model.path, desk.model, str(model)) and desk.model:
        raise PreflightError(
            f"two models are asked for: generator.desk.model={desk.model} and trainer.policy.model.path={policy.path}; "
            "set one (generator.desk.model=null leaves it to the other)"
        )
    if ref.path in (None, policy.path):
        ref.path = str(model)
    policy.path = str(model)
    _check_tokens(model)
    return model


def _check_tokens(model: Path) -> None:
    """A template and a parser that do not fit would give a run of zeros. A hub id is checked when it is there."""
    if not model.is_dir():
        return
    from deskrl.agent.model_check import check_model_dir

    for finding in check_model_dir(model):
        if not finding.ok:
            raise PreflightError(
                f"the model {model} cannot be trained token by token: {finding.name}: {finding.detail}. {finding.fix}"
            )


def _set_folders(config: SkyRLTrainConfig, run_dir: Path) -> None:
    """SkyRL's defaults write to the home folder and /tmp; a run keeps to its own."""
    from skyrl.train.config import TrainerConfig

    trainer, default = config.trainer, TrainerConfig()
    for key, folder in (("ckpt_path", CHECKPOINTS), ("export_path", "export"), ("log_path", "logs")):
        if getattr(trainer, key) == getattr(default, key):
            setattr(trainer, key, str(run_dir / folder))


def _sources(config: SkyRLTrainConfig, sources: list[str]) -> list[str]:
    """Task sources with `sample` replaced by the built-in tasks, made when missing."""
    if SAMPLE not in sources:
        return sources
    from deskrl.worlds.sample_set import build_sample_set

    tasks, worlds = build_sample_set(cache_dir() / "sample")
    desk = config.generator.desk
    desk.worlds = desk.worlds or str(worlds)
    return [str(tasks) if source == SAMPLE else source for source in sources]


def _check_worlds(config: SkyRLTrainConfig, tasks: list[Task]) -> None:
    worlds = config.generator.desk.worlds
    if worlds is None:
        return
    for task in tasks:
        world = Path(worlds) / task.world_id
        if not world.is_dir():
            raise PreflightError(f"task {task.task_id} needs the world {task.world_id}, but there is no {world}")


def _check_space(run_dir: Path, model: Path, keep: int) -> None:
    """A run that fills the disk at its first checkpoint has wasted all before it."""
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors")) if model.is_dir() else 0
    # While a checkpoint is written, the ones to keep are still there.
    need = weights // 2 * _BYTES_PER_PARAMETER * (keep + 1 if keep > 0 else 2) + _MARGIN
    free = shutil.disk_usage(run_dir).free
    if free < need:
        raise PreflightError(
            f"the run folder {run_dir} has {free / 1e9:.2f} GB free, but its checkpoints need about "
            f"{need / 1e9:.2f} GB: free some space, choose another generator.desk.run_dir, "
            "or lower trainer.max_ckpts_to_keep"
        )


def _check_hardware(config: SkyRLTrainConfig) -> None:
    kind = config.generator.desk.engine.kind
    if kind not in ("skyrl", "embedded", "vllm-cpu"):
        raise PreflightError(f"generator.desk.engine.kind is {kind!r}; use skyrl, embedded or vllm-cpu")
    if kind == "skyrl" and not os.environ.get("RAY_ADDRESS"):
        from deskrl.training.cpu.shim import has_gpu

        if not has_gpu():
            raise PreflightError(
                "this preset needs an NVIDIA GPU and there is none here: use the preset smoke-cpu, "
                "or generator.desk.engine.kind=embedded for a CPU"
            )
