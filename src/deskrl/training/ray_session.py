"""Ray for one run: its own session with its own folder where there is no cluster to join.

Invariant: a local session's files lie in `session_folder(run_id)`, a short path (Ray puts Unix sockets
there), and are removed with it; after a kill, the run's supervisor does that. A cluster (RAY_ADDRESS) is
joined as it is.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyrl.train.config import SkyRLTrainConfig

_LONGEST_FOLDER = 40
_FORWARDED = ("DESKRL_RUN_ID", "DESKRL_CACHE", "DESKRL_TRAIN_THREADS", "HF_HUB_OFFLINE", "HF_TOKEN", "WANDB_API_KEY")


def session_folder(run_id: str) -> Path:
    """Where a run's own Ray session keeps its files; at most 107 bytes are left for a socket's path."""
    base = tempfile.gettempdir()
    return Path(base if len(base) + 20 <= _LONGEST_FOLDER else "/tmp") / f"dr-ray-{run_id[-12:]}"


@contextmanager
def ray_session(config: SkyRLTrainConfig) -> Iterator[None]:
    """Ray, started or joined, for the time of the context; a session of one's own leaves no files."""
    import ray

    folder = session_folder(os.environ.get("DESKRL_RUN_ID") or str(os.getpid()))
    try:
        _start(config, folder)
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _start(config: SkyRLTrainConfig, folder: Path) -> None:
    import ray

    if os.environ.get("RAY_ADDRESS") or config.generator.desk.engine.kind == "skyrl":
        from skyrl.train.utils.utils import initialize_ray

        initialize_ray(config)
        return
    from skyrl.backends.skyrl_train.utils.ppo_utils import sync_registries
    from skyrl.train.utils.utils import prepare_runtime_environment

    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    environment = prepare_runtime_environment(config)
    environment.update({name: os.environ[name] for name in _FORWARDED if name in os.environ})
    environment["SKYRL_DUMP_INFRA_LOG_TO_STDOUT"] = "1"
    ray.init(
        # SkyRL's placement asks for a GPU for each worker; on this machine it is a name for a core.
        num_cpus=max(2, os.cpu_count() or 1),
        num_gpus=1,
        include_dashboard=False,
        object_store_memory=500 * 2**20,
        runtime_env={"env_vars": environment},
        _temp_dir=str(folder),
    )
    sync_registries()
