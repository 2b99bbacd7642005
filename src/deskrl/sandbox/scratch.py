"""The scratch root and the one folder in it that each sandbox owns.

    <root>/<run>-<id>/owner.json   which harness process owns it (pid + start time), so that leftovers show
                      root/        becomes / inside, world copies and homes beside it
                      run/         becomes /run/deskrl inside; holds the world's socket
                      etc/ stage/  made by the harness, never writable inside

Invariant: only folders with an owner.json of ours are ever deleted. The root is short (a Unix socket's path
has 107 bytes) and belongs to the user the harness runs as.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from deskrl.sandbox.errors import SandboxError, SandboxUnavailable
from deskrl.sandbox.processes import run_host

SOCKET_NAME = "world.sock"
_SOCKET_PATH_MAX = 107
# Made for the sandbox's user, parents first.
_OWNED = (
    *("root", "root/var", "root/var/tmp", "app", "home", "tmp", "run"),
    *("logs", "logs/agent", "logs/verifier", "logs/artifacts"),
)


@dataclass(frozen=True)
class Owner:
    """The harness process behind a sandbox; `started` (clock ticks since boot) tells a reused pid apart.

    `pid_namespace` is the inode of the namespace in which `pid` means something.
    """

    pid: int
    started: int
    pid_namespace: int
    sandbox_id: str
    uid: int | None
    run_id: str | None

    def alive(self) -> bool:
        """Whether that very process still runs; assumed of one in another container that shares the folder."""
        return self.pid_namespace != _pid_namespace() or process_start_time(self.pid) == self.started


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def process_start_time(pid: int) -> int | None:
    """Start time of a live process in clock ticks since boot; None when there is none (or a zombie)."""
    try:
        # The command name may hold spaces and parentheses: fields are counted from the last one.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def default_scratch_root() -> Path:
    """`<tempdir>/deskrl-sandboxes`, with the uid behind it for users other than root."""
    suffix = "" if os.geteuid() == 0 else f"-{os.geteuid()}"
    return Path(tempfile.gettempdir()) / f"deskrl-sandboxes{suffix}"


def prepare_root(root: Path) -> Path:
    """Create the scratch root if need be and check that sandboxes can live in it; returns it absolute.

    Raises SandboxUnavailable when it belongs to someone else, makes the socket path too long, or (as root)
    lies below a folder that the sandbox users cannot enter.
    """
    root = root.absolute()
    if len(str(root)) + len(f"/{'x' * 16}-{'x' * 12}/run/{SOCKET_NAME}") > _SOCKET_PATH_MAX:
        raise SandboxUnavailable(
            f"sandbox scratch folder {root} is too long for a Unix socket's path: set scratch_dir to one of "
            f"at most {_SOCKET_PATH_MAX - 44} characters"
        )
    root.mkdir(mode=0o711, parents=True, exist_ok=True)
    if root.is_symlink() or root.stat().st_uid != os.geteuid():
        raise SandboxUnavailable(
            f"sandbox scratch folder {root} belongs to another user: set scratch_dir to one of your own"
        )
    if os.geteuid() == 0 and not others_can_enter(root):
        raise SandboxUnavailable(
            f"sandbox users cannot enter scratch folder {root}: one of its parents lacks the execute "
            "permission for others. Set scratch_dir to a folder below a public one such as /tmp"
        )
    return root


def others_can_enter(path: Path) -> bool:
    """Whether any user may pass through `path` and all folders above it (files: read and run it)."""
    path = path.resolve()
    own = path.stat().st_mode
    if not (own & 0o001 if path.is_dir() else own & 0o005 == 0o005):
        return False
    return all(parent.stat().st_mode & 0o001 for parent in path.parents)


@dataclass(frozen=True)
class SandboxFolder:
    """One sandbox's folder on the host."""

    path: Path
    owner: Owner

    @property
    def socket(self) -> Path:
        """Host path of the world's socket."""
        return self.path / "run" / SOCKET_NAME

    @classmethod
    def create(cls, root: Path, run_id: str | None, uid: int | None) -> SandboxFolder:
        """Make a new folder below `root`, named after the run and owned by this process."""
        sandbox_id = uuid.uuid4().hex[:12]
        started = process_start_time(os.getpid())
        assert started is not None
        label = re.sub(r"[^A-Za-z0-9_.]", "_", run_id or "run")[:16].lstrip(".") or "run"
        owner = Owner(os.getpid(), started, _pid_namespace(), sandbox_id, uid, run_id)
        path = root / f"{label}-{sandbox_id}"
        path.mkdir(mode=0o711)
        path.chmod(0o711)
        (path / "owner.json").write_text(json.dumps(asdict(owner)))
        for name in _OWNED:
            folder = path / name
            folder.mkdir(mode=0o700)
            if uid is not None:
                os.chown(folder, uid, uid)
        (path / "stage").mkdir(mode=0o711)
        return cls(path, owner)

    @classmethod
    def read(cls, path: Path) -> SandboxFolder | None:
        """The sandbox at `path`, or None when it is not one of ours."""
        try:
            data = json.loads((path / "owner.json").read_text())
            return cls(path, Owner(**data))
        except (OSError, ValueError, TypeError):
            return None

    async def keep(self) -> None:
        """Leave the files for a person to look at: without an owner no sweep removes them."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / "owner.json").rename(self.path / "kept.json")

    async def remove(self) -> None:
        """Delete the folder and everything in it. Call it once no process of the sandbox is left.

        Raises SandboxError when something cannot be deleted.
        """
        if not self.path.exists():
            return
        # `rm` rather than shutil.rmtree: an agent may nest folders deeper than Python's recursion limit.
        # The owner file goes last, so that a sweep still knows a folder that was only half removed.
        rest = [str(entry) for entry in self.path.iterdir() if entry.name != "owner.json"]
        try:
            await run_host(["rm", "-rf", "--one-file-system", "--", *rest])
        except OSError:
            try:  # an unprivileged harness cannot enter folders that the agent made unreadable
                await run_host(["chmod", "-R", "u+rwX", "--", str(self.path)])
                await run_host(["rm", "-rf", "--one-file-system", "--", *rest])
            except OSError as error:
                raise SandboxError(f"cannot remove sandbox folder {self.path}: {error}") from error
        await run_host(["rm", "-rf", "--", str(self.path)])
