"""What isolation costs: a sandbox start with a small world, against starting a plain subprocess.

Prints one JSON line with medians in milliseconds. `python benchmarks/sandbox_start.py [--rounds N]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths

from deskrl.sandbox.bubblewrap import BubblewrapEnvironment

_FILES, _FILE_BYTES = 50, 20_000


def _make_world(folder: Path) -> Path:
    for name in ("filesystem", "apps_data", "app"):
        (folder / name).mkdir(parents=True)
    for number in range(_FILES):
        (folder / "filesystem" / f"document-{number}.txt").write_bytes(os.urandom(_FILE_BYTES))
    return folder


async def _timed(work: Callable[[], Awaitable[object]]) -> float:
    begin = time.perf_counter()
    await work()
    return (time.perf_counter() - begin) * 1e3


async def _plain() -> None:
    process = await asyncio.create_subprocess_exec("/bin/true")
    await process.wait()


async def _round(world: Path, folder: Path) -> dict[str, float]:
    (folder / "environment").mkdir(exist_ok=True)
    sandbox = BubblewrapEnvironment(
        environment_dir=folder / "environment",
        environment_name="benchmark",
        session_id="benchmark",
        trial_paths=TrialPaths(trial_dir=folder / "trial"),
        task_env_config=EnvironmentConfig(),
        world_dir=world,
    )
    try:
        return {
            "plain_ms": await _timed(_plain),
            "start_ms": await _timed(sandbox.start),
            "exec_ms": await _timed(lambda: sandbox.exec("true")),
            "quiesce_ms": await _timed(sandbox.quiesce),
            "stop_ms": await _timed(sandbox.stop),
        }
    finally:
        await sandbox.stop()


async def _run(rounds: int) -> dict[str, float | int]:
    with tempfile.TemporaryDirectory() as name:
        world = _make_world(Path(name) / "world")
        await _round(world, Path(name))  # caches and imports
        samples = [await _round(world, Path(name)) for _ in range(rounds)]
    medians = {key: round(statistics.median(sample[key] for sample in samples), 2) for key in samples[0]}
    return {"rounds": rounds, "root": int(os.geteuid() == 0), "world_files": _FILES, **medians}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    print(json.dumps(asyncio.run(_run(parser.parse_args().rounds))))


if __name__ == "__main__":
    main()
