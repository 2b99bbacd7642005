"""SkyRL's FSDP workers on a CPU: FSDP2 over gloo, weights handed to the engine through shared memory.

Everything that computes is SkyRL's. Replaced are the process group and meshes (gloo, "cpu"), the few
torch.cuda calls SkyRL makes without asking whether there is a GPU, and the weight sync, which is NCCL or
CUDA IPC there: here rank 0 writes one safetensors file and tells the engines to reload it. A CPU that
does not multiply bfloat16 natively computes in float32, which is several times faster there.

Invariants: nothing is patched on import, only in the process of a worker, when it is constructed. The
weights of a sync are on disk or in /dev/shm only while that sync runs. A tied head is neither written nor
trained apart from its embedding.
"""

import os
import shutil
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from skyrl.train.config.config import MixedPrecisionConfig
from torch.distributed.device_mesh import init_device_mesh

from deskrl.training.cpu import shim
from deskrl.training.cpu.runner import default_dtype
from deskrl.training.tied import TiedCriticWorker, TiedPolicyWorker, TiedRefWorker

_GLOO_TIMEOUT = timedelta(minutes=10)


def patch_cuda_calls() -> None:
    """Point this process's unconditional CUDA calls at the CPU. Call only where there is no GPU to use."""
    from skyrl.backends.skyrl_train.distributed import fsdp_strategy, fsdp_utils

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    fsdp_strategy.create_device_mesh = _device_mesh
    fsdp_utils._sync_non_persistent_buffers = _sync_non_persistent_buffers
    # SkyRL enters torch.autocast("cuda"), which has no effect here but warns at every micro-batch.
    warnings.filterwarnings("ignore", message="CUDA is not available or torch_xla")


def _device_mesh(world_size: int, fsdp_size: int) -> Any:
    if fsdp_size < 0 or fsdp_size >= world_size:
        return init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
    return init_device_mesh("cpu", (world_size // fsdp_size, fsdp_size), mesh_dim_names=("ddp", "fsdp"))


def _sync_non_persistent_buffers(model: torch.nn.Module, _: dict[str, Any]) -> None:
    """Give every rank rank 0's values of buffers that no state dict holds (e.g. rotary frequencies)."""
    for module in model.modules():
        for name in sorted(module._non_persistent_buffers_set):
            if (buffer := module._buffers.get(name)) is not None:
                values = buffer.detach() if dist.get_rank() == 0 else torch.empty(buffer.shape, dtype=buffer.dtype)
                dist.broadcast(values, src=0)
                module._buffers[name] = values


class _OnCpu:
    """Put before a worker class."""

    cfg: Any
    _world_size: int
    sequence_parallel_size: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        patch_cuda_calls()
        torch.set_num_threads(int(os.environ.get("DESKRL_TRAIN_THREADS") or len(os.sched_getaffinity(0))))
        super().__init__(*args, **kwargs)
        if default_dtype() == torch.float32:  # SkyRL computes in bfloat16 unless told otherwise
            for part in (self.cfg.policy, self.cfg.critic, self.cfg.ref):
                if part.fsdp_config.mixed_precision is None:
                    part.fsdp_config.mixed_precision = MixedPrecisionConfig(param_dtype="fp32", reduce_dtype="fp32")

    def init_worker_process_group(self) -> None:
        """As SkyRL's, over gloo."""
        from skyrl.backends.skyrl_train.distributed.dispatch import MeshRank

        if not dist.is_initialized():
            dist.init_process_group(backend="gloo", timeout=_GLOO_TIMEOUT)
        sp = self.sequence_parallel_size
        dp = self._world_size // sp
        self.device_mesh = init_device_mesh("cpu", (dp, sp), mesh_dim_names=("dp", "sp"))
        self.mesh_rank = MeshRank(
            dp=self.device_mesh.get_local_rank("dp"),
            sp=self.device_mesh.get_local_rank("sp"),
            tp=0,
            pp=0,
            world_size=self._world_size,
            dp_size=dp,
            pp_size=1,
        )


class CpuPolicyWorker(_OnCpu, TiedPolicyWorker):
    """The policy, which also feeds the engines."""

    async def init_weight_sync_state(self, inference_engine_client: Any, inference_engine_cfg: Any) -> None:
        """Nothing to set up: a sync is one file and one request."""

    async def broadcast_to_inference_engines(
        self, inference_engine_client: Any, inference_engine_cfg: Any, model_id: str | None = None
    ) -> None:
        """Make every engine serve the current weights; SkyRL pauses and resumes them around this."""
        from skyrl.train.utils.utils import str_to_torch_dtype

        if self._is_lora:
            raise NotImplementedError("LoRA is not synced on a CPU: set trainer.policy.model.lora.rank=0")
        weights = gather_weights(self.model.model, str_to_torch_dtype(inference_engine_cfg.model_dtype))
        if dist.get_rank() == 0:
            asynchronous = self.cfg.fully_async
            recompute = not asynchronous.enabled or asynchronous.clear_kv_cache_on_weight_sync
            try:
                await send_weights(weights, Path(self.cfg.policy.model.path), inference_engine_client, recompute)
            finally:
                await inference_engine_client.aclose()  # Ray made a copy for this call, with its own connections
        dist.barrier()


class CpuCriticWorker(_OnCpu, TiedCriticWorker):
    """The critic."""


class CpuRefWorker(_OnCpu, TiedRefWorker):
    """The reference model."""


def gather_weights(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A sharded model's whole weights by name, one name per tied group; every rank must take part."""
    every = dict(model.named_parameters(remove_duplicate=False))
    second_names = every.keys() - dict(model.named_parameters()).keys()
    weights = {}
    for name, value in model.state_dict().items():
        if name not in second_names:
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            weights[name] = whole.detach().to(dtype).contiguous()
    return weights


async def send_weights(weights: dict[str, torch.Tensor], model_dir: Path, client: Any, recompute_running: bool) -> None:
    """Write the weights, have every engine load them, remove them.

    `model_dir` is where the model started from; `recompute_running` also discards the keys of running
    requests, which the old weights computed.
    """
    folder = shim.pick_weights_folder(sum(t.nbytes for t in weights.values()))
    shutil.rmtree(folder, ignore_errors=True)  # of a run with this id that was killed in a sync
    folder.mkdir(mode=0o700)
    try:
        _write_model(weights, model_dir, folder)
        request = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        # SkyRL's client has a method for each of its own transfers, but none for this.
        await client._call_all_servers("/collective_rpc", request)
        await client.reset_prefix_cache(reset_running_requests=recompute_running)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_model(weights: dict[str, torch.Tensor], model_dir: Path, folder: Path) -> None:
    from safetensors.torch import save_file

    # vLLM takes the folder for a model's, so it gets the model's small files too.
    for file in model_dir.glob("*.json"):
        if "index" not in file.name:
            shutil.copy(file, folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


# Threads that spin while they wait for each other make a step ten times slower on busy cores; OpenMP reads
# this when it is loaded, so it has to be there when the worker's process starts.
_actor = ray.remote(num_gpus=0, runtime_env={"env_vars": {"OMP_WAIT_POLICY": "PASSIVE"}})
PolicyWorker = _actor(CpuPolicyWorker)
CriticWorker = _actor(CpuCriticWorker)
RefWorker = _actor(CpuRefWorker)
