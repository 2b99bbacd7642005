"""Leftovers of harnesses that died: found by their owner record, killed, removed.

A harness killed by SIGKILL takes its sandboxes' processes with it (see `namespace`), but their folders stay.
Only folders whose owning process (pid and start time) is gone are touched.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from deskrl.sandbox.errors import SandboxError
from deskrl.sandbox.scratch import SandboxFolder, default_scratch_root

_KILL_WAIT = 10.0


def _sandboxes(scratch_root: Path) -> Iterator[SandboxFolder]:
    if not scratch_root.is_dir() or scratch_root.stat().st_uid != os.geteuid():
        return  # another user's folder: its owner records are not to be believed
    for path in sorted(scratch_root.iterdir()):
        folder = SandboxFolder.read(path) if path.is_dir() and not path.is_symlink() else None
        if folder is not None:
            yield folder


def live_sandboxes(scratch_root: str | Path | None = None) -> list[SandboxFolder]:
    """The sandboxes below `scratch_root` (default: the default one) whose harness is alive."""
    root = Path(scratch_root) if scratch_root is not None else default_scratch_root()
    return [folder for folder in _sandboxes(root) if folder.owner.alive()]


def sandbox_processes(folder: SandboxFolder) -> list[int]:
    """Host pids that belong to a sandbox: bwrap and process 1 by their tag, and as root all by their uid."""
    tag = f"deskrl-sandbox:{folder.owner.sandbox_id}".encode()
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            own_uid = folder.owner.uid is not None and entry.stat().st_uid == folder.owner.uid
            if state not in "ZX" and (own_uid or tag in (entry / "cmdline").read_bytes().split(b"\0")):
                found.append(int(entry.name))
    return found


def _kill_all(folder: SandboxFolder) -> None:
    deadline = time.monotonic() + _KILL_WAIT
    while pids := sandbox_processes(folder):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise SandboxError(f"processes {pids} of dead sandbox {folder.path} do not end on SIGKILL")
        time.sleep(0.01)


def sweep(scratch_root: str | Path | None = None) -> list[str]:
    """Kill and remove every sandbox whose harness is dead; returns the removed folders' paths.

    Blocking: call it at start-up, or with asyncio.to_thread from within an event loop. A folder that another
    sweep removes meanwhile is no error. Raises SandboxError when processes will not die or files cannot be
    deleted.
    """
    import asyncio

    root = Path(scratch_root) if scratch_root is not None else default_scratch_root()
    removed: list[str] = []
    for folder in _sandboxes(root):
        if folder.owner.alive():
            continue
        # The uid may have been handed on to a sandbox of a living harness: then only the tag counts.
        _kill_all(_without_reused_uid(folder, root))
        asyncio.run(folder.remove())
        removed.append(str(folder.path))
    return removed


def _without_reused_uid(folder: SandboxFolder, root: Path) -> SandboxFolder:
    reused = any(other.owner.uid == folder.owner.uid and other.owner.alive() for other in _sandboxes(root))
    return SandboxFolder(folder.path, replace(folder.owner, uid=None)) if reused else folder
