"""Starts a training process as a child, and cleans up after it whatever its end.

Model: all processes of a run (trainer, Ray, workers, engine) inherit `DESKRL_RUN_ID`, so that what is left of
it can be found by that mark. Sandboxes have a clean environment; they die with their harness and their
folders are swept.

Invariant: after `finish` no process, sandbox, shared-memory folder or Ray session of the run is left, also
when the child was killed. Runs in the parent, imports neither torch nor Ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deskrl.training.files import ERROR_FILE, LOG_FILE, make_run_folder
from deskrl.trials.progress import PROGRESS_FILE

GRACE_S = 20.0
_MARK = "DESKRL_RUN_ID"


class TrainingProcess:
    """One training child process."""

    def __init__(self, preset: str, overrides: Sequence[str], run_dir: Path, *flags: str) -> None:
        self.run_dir = run_dir
        self.run_id = secrets.token_hex(6)
        self.log_path = run_dir / LOG_FILE
        self._command = [sys.executable, "-m", "deskrl.training.main", preset, *overrides, *flags]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, its output in the run's log. Raises RunFolderError."""
        make_run_folder(self.run_dir)
        for stale in (ERROR_FILE, PROGRESS_FILE):
            (self.run_dir / stale).unlink(missing_ok=True)
        environment = {
            **os.environ,
            _MARK: self.run_id,
            "DESKRL_SUPERVISED": "1",
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            # Threads that wait by spinning take the cores from those that compute: trainer and engine share them.
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
            "HARBOR_TELEMETRY": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            # Ray's hook would run the workers through `uv run`, which resolves the environment anew each time.
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        }
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C in the terminal goes to the parent, which passes it on once
            )

    def poll(self) -> int | None:
        """The exit code once it has ended."""
        return None if self._process is None else self._process.poll()

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Ask it to end; after `grace_s` seconds kill it."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGINT)
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def finish(self, grace_s: float = GRACE_S) -> int:
        """Stop it if need be, remove everything of the run that is not a result; returns the exit code."""
        self.stop(grace_s)
        remove_leftovers(self.run_id)
        return self._process.returncode if self._process is not None else 0

    def error(self) -> str:
        """What went wrong, in one message: its own, or the end of its log."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            return str(json.loads((self.run_dir / ERROR_FILE).read_text())["message"])
        with contextlib.suppress(OSError):
            lines = self.log_path.read_text(errors="replace").splitlines()
            if lines:
                return "\n".join(lines[-15:])
        code = self.poll()
        return (
            f"the training process ended with exit code {code} and left no message: is the disk of {self.run_dir} full?"
        )


def run_processes(run_id: str) -> Iterator[int]:
    """Process ids that carry a run's mark, this process excepted."""
    mark = f"{_MARK}={run_id}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)


def _is_resource_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def remove_leftovers(run_id: str) -> None:
    """Kill what carries the run's mark; remove dead sandboxes, shared weights and the Ray session's folder."""
    started, quiet = time.monotonic(), 0
    deadline = started + 15
    # A process between fork and exec shows no environment: only several empty looks mean that none is left.
    while quiet < 3 and time.monotonic() < deadline:
        pids = list(run_processes(run_id))
        quiet = 0 if pids else quiet + 1
        for pid in pids:
            # Python's resource trackers end by themselves, and remove their owners' semaphores as they do.
            if _is_resource_tracker(pid) and time.monotonic() < started + 3:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    from deskrl.sandbox.sweep import sweep
    from deskrl.training.cpu.shim import remove_shared_weights
    from deskrl.training.ray_session import session_folder

    sweep()
    remove_shared_weights(run_id)
    folder = session_folder(run_id)
    while folder.exists():  # what was just killed may have been adding to it
        shutil.rmtree(folder, ignore_errors=True)
        if time.monotonic() > deadline + 10:
            break
        time.sleep(0.05)


def memory_of(run_id: str) -> int:
    """Bytes of memory that the run's processes take together, shared pages counted once (PSS)."""
    total = 0
    for pid in run_processes(run_id):
        with contextlib.suppress(OSError, IndexError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def read_progress(run_dir: Path) -> dict[str, Any]:
    """The run's counters (`deskrl.trials.progress`); empty when there are none yet."""
    try:
        return dict(json.loads((run_dir / PROGRESS_FILE).read_text()))
    except (OSError, ValueError):
        return {}
