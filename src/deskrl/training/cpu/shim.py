"""Lets SkyRL's FSDP workers run where there is no GPU, by replacing imports, never files.

    shim.install()  # in the driver, before SkyRL's `_setup_trainer`

Invariants: with a GPU on the machine `install` changes nothing; the flash_attn stub exists only while
SkyRL's model wrapper is imported, so that no other package (vLLM, transformers) takes it for the real one.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import shutil
import sys
import tempfile
import types
from pathlib import Path
from typing import Any, cast


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU, even one hidden from this process by CUDA_VISIBLE_DEVICES.

    Ray hides all of them from tasks that ask for none, and the driver may be such a task.
    """
    import torch

    return torch.cuda.is_available() or Path("/dev/nvidiactl").exists()


def install(cpu: bool | None = None) -> bool:
    """Make SkyRL's FSDP worker classes, in this process, those of `cpu.workers`; returns whether it did.

    `cpu=None` decides by `has_gpu`; give it where the driver's machine differs from the workers'.
    """
    if not (not has_gpu() if cpu is None else cpu):
        return False
    from deskrl.training.cpu import workers

    fsdp_worker = import_fsdp_worker()
    for name in ("PolicyWorker", "CriticWorker", "RefWorker"):
        setattr(fsdp_worker, name, getattr(workers, name))
    return True


def import_fsdp_worker() -> Any:
    """SkyRL's `fsdp_worker` module, importable without flash-attn, which it needs only on some paths."""
    if importlib.util.find_spec("flash_attn") is None:
        _with_flash_attn_stub("skyrl.backends.skyrl_train.workers.model_wrapper")
    return importlib.import_module("skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker")


def weights_folder(run_id: str | None = None, base: Path | None = None) -> Path:
    """Where a run's weights pass from trainer to engine, under `base` (/dev/shm if there is one)."""
    run_id = run_id or os.environ.get("DESKRL_RUN_ID") or f"pid{os.getpid()}"
    if "/" in run_id or run_id.startswith("."):
        raise ValueError(f"a run id is part of a folder's name, which {run_id!r} cannot be")
    return (base or _bases()[0]) / f"deskrl-weights-{run_id}"


def pick_weights_folder(need_bytes: int) -> Path:
    """This run's `weights_folder` in the first place with room for `need_bytes`; OSError if none has."""
    for base in _bases():
        if shutil.disk_usage(base).free > need_bytes:
            return weights_folder(base=base)
    places = " or ".join(map(str, _bases()))
    raise OSError(f"no room for {need_bytes / 1e6:.0f} MB of weights in {places}: free some, or set TMPDIR")


def remove_shared_weights(run_id: str) -> None:
    """Remove what a run that was killed in a weight sync may have left; harmless when there is nothing."""
    for base in _bases():
        shutil.rmtree(weights_folder(run_id, base), ignore_errors=True)


def _bases() -> list[Path]:
    memory, disk = Path("/dev/shm"), Path(tempfile.gettempdir())
    return [memory, disk] if memory.is_dir() and os.access(memory, os.W_OK) else [disk]


def _with_flash_attn_stub(module: str) -> None:
    """Import `module` while a flash_attn with only `bert_padding` exists."""
    from transformers.utils import import_utils

    package, padding = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.bert_padding")
    package.__path__ = []
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None, is_package=True)
    padding.__spec__ = importlib.machinery.ModuleSpec("flash_attn.bert_padding", None)
    padding.pad_input = padding.unpad_input = _needs_flash_attn  # type: ignore[attr-defined]
    sys.modules |= {package.__name__: package, padding.__name__: padding}
    # transformers looks the package's distribution up once it is importable; a name other than
    # flash-attn makes it answer "not available" instead of raising KeyError.
    mapping: dict[str, list[str]] = cast(Any, import_utils).PACKAGE_DISTRIBUTION_MAPPING
    added = "flash_attn" not in mapping
    mapping.setdefault("flash_attn", ["deskrl-stub"])
    try:
        importlib.import_module(module)
    finally:
        del sys.modules[package.__name__], sys.modules[padding.__name__]
        if added:
            del mapping["flash_attn"]


def _needs_flash_attn(*_: object, **__: object) -> None:
    raise RuntimeError("this path needs flash-attn: set trainer.remove_microbatch_padding=false")
