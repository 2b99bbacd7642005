"""SkyRL experiments over desk tasks: synchronous, fully async, and evaluation only.

An experiment gets everything that SkyRL asks a hook for: the dataset of task directories, the generator over
harbor trials, the trainer with its overrides, the tracker that writes the run folder. The engine is SkyRL's
own on GPUs or one that already runs (`engine_url`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp

from deskrl.agent.engine import register_weight_version
from deskrl.agent.files import HARNESS_FILES
from deskrl.tasks.schema import Task
from deskrl.training.dataset import TaskDataset, TaskSetError
from deskrl.training.generator import GeneratorRules, TrialGenerator
from deskrl.training.tracking import RunTracking
from deskrl.training.trainers import AsyncTrainer, SyncTrainer
from deskrl.trials.progress import Progress
from deskrl.trials.runner import RunnerSettings, TrialRunner


class DeskExperiment(BasePPOExp):
    """Training, synchronous or fully async as the configuration says.

    Args:
        cfg: the resolved configuration (`deskrl.training.config`).
        tasks, eval_tasks: what to train and to evaluate on.
        engine_url: a running engine; None lets SkyRL start its own.
    """

    def __init__(
        self,
        cfg: SkyRLTrainConfig,
        tasks: Sequence[Task],
        eval_tasks: Sequence[Task],
        progress: Progress,
        engine_url: str | None = None,
    ) -> None:
        self._train_tasks, self._eval_tasks = list(tasks), list(eval_tasks)
        self._engine_url = engine_url
        self._progress = progress
        super().__init__(cfg)

    def get_train_dataset(self) -> TaskDataset:
        """Raises TaskSetError when the tasks do not fill one training batch."""
        dataset = TaskDataset(self._train_tasks)
        need = self.cfg.trainer.train_batch_size
        if len(dataset) < need:
            raise TaskSetError(f"{len(dataset)} tasks cannot fill a batch: trainer.train_batch_size is {need}")
        return dataset

    def get_eval_dataset(self) -> TaskDataset | None:
        """None when the configuration never evaluates."""
        return TaskDataset(self._eval_tasks) if self._eval_tasks and self.cfg.trainer.eval_interval > 0 else None

    def get_tracker(self) -> RunTracking:
        """The configured tracker, plus metrics.jsonl."""
        trainer = self.cfg.trainer
        return RunTracking(
            Path(self.cfg.generator.desk.run_dir),
            self._progress,
            project_name=trainer.project_name,
            experiment_name=trainer.run_name,
            backend=trainer.logger,
            config=self.cfg,
            tags=trainer.tags,
        )

    def get_inference_client(self) -> Any:
        """A client of the running engine, or SkyRL's own engines."""
        if self._engine_url is None:
            return super().get_inference_client()
        from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

        return RemoteInferenceClient(
            proxy_url=self._engine_url,
            server_urls=[self._engine_url],
            data_parallel_size=1,
            model_name=self.cfg.generator.inference_engine.served_model_name,
            tokenizer=self.tokenizer,
        )

    def get_generator(self, cfg: SkyRLTrainConfig, tokenizer: Any, inference_engine_client: Any) -> TrialGenerator:
        """The generator over harbor trials, sampling from the client's address."""
        url = str(inference_engine_client.proxy_url)
        register_weight_version(url, lambda: int(inference_engine_client.weight_version))
        desk = cfg.generator.desk
        return TrialGenerator(
            TrialRunner(runner_settings(cfg, url), self._progress),
            [*self._train_tasks, *self._eval_tasks],
            Path(desk.worlds) if desk.worlds else None,
            tokenizer.pad_token_id,
            GeneratorRules(desk.timeout_mask_instance_threshold, cfg.generator.apply_overlong_filtering),
        )

    def get_trainer(self, cfg: SkyRLTrainConfig, **kwargs: Any) -> Any:
        """The trainer that the configuration asks for."""
        return (AsyncTrainer if cfg.trainer.fully_async.enabled else SyncTrainer)(cfg=cfg, **kwargs)


class EvalExperiment(DeskExperiment):
    """Evaluates the weights an engine serves as they are: no trainer, no update."""

    def get_train_dataset(self) -> None:  # type: ignore[override]
        """Nothing is trained."""
        return None

    def get_eval_dataset(self) -> TaskDataset:
        """The evaluation tasks."""
        return TaskDataset(self._eval_tasks)

    def run(self) -> dict[str, float]:
        """The metrics of one pass (`generator.eval_n_samples_per_prompt` samples a task)."""
        from skyrl.train.evaluate import evaluate
        from skyrl.train.utils.trainer_utils import build_dataloader

        tracker = self.get_tracker()
        generator = self.get_generator(self.cfg, self.tokenizer, self.get_inference_client())
        loader = build_dataloader(self.cfg, self.eval_dataset, is_train=False)

        async def once() -> dict[str, float]:
            return dict(await evaluate(loader, generator, self.cfg, None, self.tokenizer))

        result = asyncio.run(once())
        tracker.log(result, step=0, commit=True)
        tracker.finish()
        return result


def runner_settings(cfg: SkyRLTrainConfig, engine_url: str) -> RunnerSettings:
    """How trials of this configuration run, against an engine's address."""
    desk = cfg.generator.desk
    kwargs = dict(desk.environment_kwargs)
    if desk.environment.endswith(":BubblewrapEnvironment"):
        # The harness's own record of a trial is not to be replaced by anything from inside the sandbox.
        kwargs.setdefault("trusted_agent_files", list(HARNESS_FILES))
        kwargs.setdefault("run_id", run_id_of(Path(desk.run_dir)))
    return RunnerSettings(
        trials_dir=(Path(desk.run_dir) / "trials").absolute(),
        agent={
            "base_url": engine_url,
            "served_model": cfg.generator.inference_engine.served_model_name or cfg.trainer.policy.model.path,
            "model_dir": str(cfg.trainer.policy.model.path),
            "max_context": desk.max_context,
            "max_turn_tokens": cfg.generator.sampling_params.max_generate_length,
            "max_turns": desk.max_turns,
            "tools": desk.tools,
            "optional_arguments": desk.optional_arguments,
            "tool_timeout_s": desk.tool_timeout,
            "model_timeout_s": desk.model_timeout,
            "engine_retry_s": desk.engine_retry,
            "world_timeout_s": desk.world_timeout,
        },
        environment=desk.environment,
        environment_kwargs=kwargs,
        max_concurrent=desk.max_concurrent_trials,
        starts_per_second=desk.trial_starts_per_second,
        retries=desk.trial_retries,
        grade_truncated=desk.grade_truncated,
        agent_timeout_s=desk.agent_timeout,
        agent_import_path=desk.agent_import_path,
    )


def run_id_of(run_dir: Path) -> str:
    """The mark that a run's processes, sandboxes and shared memory carry: from the environment, else its folder."""
    return os.environ.get("DESKRL_RUN_ID") or run_dir.name
