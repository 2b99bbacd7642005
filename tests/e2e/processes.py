"""Running `deskrl` in a process of its own and finding everything it leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

MARK = "DESKRL_TEST_MARK"


class Deskrl:
    """One `deskrl` command; all its descendants inherit a mark, by which `leftovers` finds them."""

    def __init__(self, arguments: Sequence[str], cwd: Path, **environment: str) -> None:
        self.mark = uuid.uuid4().hex
        self.before = _shared()
        self.output = cwd / f"output-{self.mark}.txt"
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "deskrl", *arguments],
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment, MARK: self.mark, "COLUMNS": "200"},
            )

    def wait(self, seconds: float) -> int:
        """The exit code. On a timeout everything is killed and the output shown."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            text = self.text()
            self.kill()
            raise AssertionError(f"still running after {seconds} s:\n{text[-4000:]}") from None

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def kill(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z" and wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def leftovers(self) -> list[str]:
        """Processes, shared-memory folders, Ray sessions and sandboxes that were not there before."""
        deadline = time.monotonic() + 5
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)  # a process that was told to end may need a moment
        running = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in self.processes()]
        return running + sorted(_shared() - self.before)


def _shared() -> set[str]:
    from deskrl.sandbox.scratch import SandboxFolder, default_scratch_root

    patterns = [(Path("/dev/shm"), "*"), (Path("/tmp"), "dr-ray-*")]
    found = {str(path) for folder, pattern in patterns for path in folder.glob(pattern)}
    # A sandbox of a living harness belongs to someone else's run by now: none of this one's lives.
    sandboxes = [SandboxFolder.read(path) for path in default_scratch_root().glob("*")]
    return found | {str(s.path) for s in sandboxes if s is not None and not s.owner.alive()}
