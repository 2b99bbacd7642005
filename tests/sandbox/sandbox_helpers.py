"""Shared by the sandbox tests: environments built as harbor builds them, and what of them is left on the host."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths

from deskrl.sandbox.bubblewrap import BubblewrapEnvironment
from deskrl.sandbox.scratch import SandboxFolder
from deskrl.sandbox.sweep import sandbox_processes

Start = Callable[..., Awaitable[BubblewrapEnvironment]]


def make_environment(folder: Path, scratch: Path, **kwargs: Any) -> BubblewrapEnvironment:
    """An environment whose task and trial folders lie in `folder`; not started."""
    (folder / "environment").mkdir(parents=True, exist_ok=True)
    paths = TrialPaths(trial_dir=folder / "trial")
    paths.mkdir()
    return BubblewrapEnvironment(
        environment_dir=folder / "environment",
        environment_name="test",
        session_id="test",
        trial_paths=paths,
        task_env_config=EnvironmentConfig(),
        scratch_dir=scratch,
        **kwargs,
    )


def folders(scratch: Path) -> list[SandboxFolder]:
    """The sandbox folders below a scratch root."""
    found = [SandboxFolder.read(path) for path in scratch.iterdir() if path.is_dir()]
    return [folder for folder in found if folder is not None]


def wait_until_dead(folder: SandboxFolder, seconds: float = 20) -> list[int]:
    """The sandbox's processes that are left once there are none, or after `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := sandbox_processes(folder)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def open_descriptors() -> set[str]:
    """What this process has open, but for regular files and libraries' own event descriptors."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("pipe:") or "deskrl" in target or target.startswith("/proc/"):
            found.add(f"{name} {target}")
    return found
