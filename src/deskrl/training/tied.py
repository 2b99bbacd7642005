"""FSDP workers whose tied embeddings stay tied.

SkyRL 0.3.0 moves a model to the meta device before sharding it. That gives the input embedding and the
output head, one tensor in a tied model, a parameter each. They then train apart, the checkpoint stores
both, and an inference engine, which keeps them tied, follows only one: its log-probabilities drift from
the trainer's. Tying them again after the move and before sharding is all it takes.

    tied.install()  # in the driver, before SkyRL's `_setup_trainer`: GPU workers with the fix
"""

from functools import wraps
from typing import Any

import ray

from deskrl.training.cpu.shim import import_fsdp_worker

import_fsdp_worker()  # which makes the next import work without flash-attn

from skyrl.backends.skyrl_train.distributed import fsdp_strategy  # noqa: E402
from skyrl.backends.skyrl_train.workers.fsdp import fsdp_worker  # noqa: E402


def retie_before_sharding() -> None:
    """Patch, in this process, the step of SkyRL that shards a model; calling it again changes nothing."""
    shard = fsdp_strategy.apply_fsdp2
    if hasattr(shard, "__wrapped__"):
        return

    @wraps(shard)
    def tied_shard(model: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(model.config, "tie_word_embeddings", False):
            model.tie_weights()
        return shard(model, *args, **kwargs)

    fsdp_strategy.apply_fsdp2 = tied_shard


class RetieMixin:
    """Put before a SkyRL FSDP worker class."""

    def init_model(self, *args: Any, **kwargs: Any) -> Any:
        """As SkyRL's, with the fix."""
        retie_before_sharding()
        return super().init_model(*args, **kwargs)  # type: ignore[misc]


class TiedPolicyWorker(RetieMixin, fsdp_worker.FSDPPolicyWorkerBase):
    """The policy."""


class TiedCriticWorker(RetieMixin, fsdp_worker.FSDPCriticWorkerBase):
    """The critic."""


class TiedRefWorker(RetieMixin, fsdp_worker.FSDPRefWorkerBase):
    """The reference model."""


def install() -> None:
    """Make SkyRL's FSDP worker classes, in this process, the ones above, with a GPU each."""
    for name, worker in (
        ("PolicyWorker", TiedPolicyWorker),
        ("CriticWorker", TiedCriticWorker),
        ("RefWorker", TiedRefWorker),
    ):
        setattr(fsdp_worker, name, ray.remote(num_gpus=1)(worker))
