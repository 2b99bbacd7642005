"""`deskrl doctor`: what this machine can do, each finding with its remedy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from deskrl.cache import cache_dir
from deskrl.sandbox.doctor import Check, check_sandbox

_HARBOR = "0.21.0"
_PINNED_TRAINING: dict[str, str | None] = {"skyrl": "0.3.0", "ray": "2.56.0", "torch": None, "transformers": None}
_ROOM = 10 * 2**30


def check_all() -> Iterator[Check]:
    """All checks, cheap ones first."""
    version = ".".join(str(part) for part in sys.version_info[:3])
    fits = sys.version_info[:2] >= (3, 12)
    yield Check("Python", fits, version, "" if fits else "use Python 3.12")
    yield _distribution("harbor", _HARBOR)
    if importlib.util.find_spec("skyrl") is None:
        yield Check("training", True, "not installed; evaluation and trials work without", "uv sync --extra train")
    else:
        for name, wanted in _PINNED_TRAINING.items():
            yield _distribution(name, wanted)
        gpu = Path("/dev/nvidiactl").exists()
        yield Check("GPU", True, "NVIDIA driver present" if gpu else "none: presets for a CPU only (smoke-cpu)")
    cache = cache_dir()
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    roomy = free > _ROOM
    yield Check(
        "disk for the cache", roomy, f"{free / 2**30:.0f} GiB free at {existing}", "" if roomy else "set DESKRL_CACHE"
    )
    yield from check_sandbox()


def _distribution(name: str, wanted: str | None) -> Check:
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, False, "not installed", "uv sync --extra train")
    return Check(name, wanted in (None, found), found, "" if wanted in (None, found) else f"install {name}=={wanted}")
