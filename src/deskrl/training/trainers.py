"""SkyRL's trainers with what a desk run needs on top, by override only.

- The last checkpoint of a fully-async run is labelled with the step that was trained (SkyRL 0.3.0 calls the
  trainer's save after it has counted one step further, so a resume would skip a step).
- Old checkpoints are removed by the driver itself where all nodes share its disk: a Ray task for it costs a
  cold worker start.
- A batch with nothing to learn from (all rewards equal) does not touch the weights, and a batch in which
  every trial failed stops the run with the reasons instead of training on nothing.
- Evaluation also measures how far the trainer's logprobs are from the engine's on fresh samples, and its
  metrics are logged at once: SkyRL 0.3.0's async trainer logs them with the next step, so the last is lost.
"""

from __future__ import annotations

import asyncio
from typing import Any

from loguru import logger
from skyrl.backends.skyrl_train.distributed.dispatch import loss_fn_outputs_to_tensor
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch, pad_training_input_batch
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.trainer_utils import cleanup_old_checkpoints

from deskrl.training.files import LOGPROB_GAP
from deskrl.training.generator import TrialGenerator
from deskrl.training.trajectory import Trajectory


class TrialsFailedError(RuntimeError):
    """Not one trial of a batch could be trained on; the message says how they ended."""


class DeskTrainerMixin:
    """Overrides shared by the synchronous and the fully-async trainer."""

    cfg: Any
    all_metrics: dict[str, Any]
    generator: TrialGenerator
    dispatch: Any
    tokenizer: Any
    tracker: Any
    global_step: int

    def _cleanup_old_checkpoints(self) -> None:
        cleanup_old_checkpoints(self.cfg.trainer.ckpt_path, self.cfg.trainer.max_ckpts_to_keep)

    def train_critic_and_policy(self, data: TrainingInputBatch) -> dict[str, float]:
        """As SkyRL's, but only on a batch with something to learn from.

        Raises TrialsFailedError when every trial of the batch failed.
        """
        if int(data["loss_mask"].sum()) > 0:
            self.all_metrics["policy/update_skipped"] = 0
            status: dict[str, float] = super().train_critic_and_policy(data)  # type: ignore[misc]
            return status
        if self.all_metrics.get("trials/masked") == self.all_metrics.get("trials/count"):
            ends = {k.removeprefix("outcomes/"): v for k, v in self.all_metrics.items() if k.startswith("outcomes/")}
            raise TrialsFailedError(
                "every trial of a batch failed, nothing to train on: "
                + ", ".join(f"{int(count)} x {kind}" for kind, count in sorted(ends.items()))
                + "; the reasons are in trials.jsonl"
            )
        logger.warning("all rewards of this batch are equal within their groups: no update in this step")
        self.all_metrics["policy/update_skipped"] = 1
        return {}

    async def eval(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As SkyRL's, with the logprob gap on samples drawn wholly from the present weights."""
        self.generator.probe.clear()
        result: dict[str, float] = await super().eval(*args, **kwargs)  # type: ignore[misc]
        probe = list(self.generator.probe)
        # Colocated, the engine still holds the GPU: the training step's own metric has to do there.
        if probe and not self.cfg.trainer.placement.colocate_all:
            result[LOGPROB_GAP] = await asyncio.to_thread(self._logprob_gap, probe)
        self.tracker.log(result, step=self.global_step, commit=False)
        return result

    def _logprob_gap(self, probe: list[Trajectory]) -> float:
        """Mean |trainer's logprob - engine's| over the sampled tokens of `probe`."""
        sequences, attention, _, _, mask, engine, _ = convert_prompts_responses_to_batch_tensors(
            self.tokenizer,
            [t.prompt_ids for t in probe],
            [t.response_ids for t in probe],
            [[0.0] * len(t.response_ids) for t in probe],
            [t.mask for t in probe],
            [t.logprobs for t in probe],
        )
        batch = TrainingInputBatch({"sequences": sequences, "attention_mask": attention})
        batch.metadata = {"response_length": mask.shape[1]}
        ranks = self.dispatch.dp_size("policy")  # a batch must be a multiple of them
        output = self.dispatch.forward("policy", pad_training_input_batch(batch, -len(probe) % ranks))
        trainer = loss_fn_outputs_to_tensor(output.loss_fn_outputs, key="logprobs")[: len(probe)]
        return float((trainer - engine)[mask > 0].abs().mean())


class SyncTrainer(DeskTrainerMixin, RayPPOTrainer):
    """Generate, train, sync, in turns."""


class AsyncTrainer(DeskTrainerMixin, FullyAsyncRayPPOTrainer):
    """Generation and training at the same time, with bounded staleness."""

    def save_checkpoints(self) -> str:
        """Saves under the number of the last trained step; returns the checkpoint's folder."""
        # Only the save after the loop sees a step beyond the last one.
        beyond = self.global_step > self.total_training_steps
        self.global_step -= int(beyond)
        try:
            return str(super().save_checkpoints())
        finally:
            self.global_step += int(beyond)
