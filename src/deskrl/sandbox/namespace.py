"""One set of Linux namespaces made by bwrap, and commands run inside it.

Process 1 inside is a bash that reads from a pipe held by the harness: it reaps orphans, cannot be signalled
from inside, and ends the namespace when the harness is gone; `--die-with-parent` does so too. (That signal
comes when the *thread* that started bwrap ends: keep the event loop's thread alive while sandboxes run.)

Every later command enters through nsenter and drops all capabilities for good before anything of the agent's
can run. The namespaces are named through a descriptor of /proc/<pid>, which stays bound to that very process:
after its death a reused pid cannot make a command run in the host's namespaces.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from deskrl.sandbox.errors import SandboxError, SandboxUnavailable
from deskrl.sandbox.processes import Child, Completed, finish, kill_group, run_bounded, start_process
from deskrl.sandbox.runtime import host_tool

_READY = "deskrl-ready"
# Keeps descriptor 0 (the harness's pipe) and gives up the others before waiting.
_INIT = f"echo {_READY}; exec >/dev/null 2>&1; while read -r _; do :; done"
# Bind-mounts pairs of paths in a mount namespace of its own, then becomes the real command.
_STAGE = 'while [ "$1" != -- ]; do mount --bind "$1" "$2" || exit 97; shift 2; done; shift; exec "$@"'
_START_LIMIT = 60.0
# In the environment of every process that a command starts, so that they can be found again.
_MARK = "DESKRL_EXEC"
_LINKER = ("LD_", "GLIBC_", "GCONV_")
_KILL_ROUNDS = 100


@dataclass(frozen=True)
class Limits:
    """rlimits of every command: processes per sandbox, bytes per file, bytes of data per process."""

    processes: int = 2048
    file_bytes: int = 4 << 30
    data_bytes: int = 8 << 30


@dataclass(frozen=True)
class Plan:
    """What `Namespace.launch` needs: bwrap, its mount arguments, who the sandbox is on the host.

    `uid` None means: the (unprivileged) user of the harness. `staged` are (host folder, mount point) pairs
    for folders that the sandbox user cannot reach by itself. `tag` marks the sandbox in the process list.
    """

    bwrap: str
    mounts: Sequence[str]
    environment: Mapping[str, str]
    uid: int | None
    staged: Sequence[tuple[str, str]]
    tag: str
    limits: Limits = Limits()


class Namespace:
    """A running sandbox's processes. `kill` ends all of them; the files stay."""

    def __init__(self, plan: Plan, bwrap: Child, init_pid: int, proc_fd: int) -> None:
        self._plan, self._bwrap, self._init_pid, self._proc_fd = plan, bwrap, init_pid, proc_fd

    @classmethod
    async def launch(cls, plan: Plan) -> Namespace:
        """Start bwrap and wait until process 1 runs in the finished file tree.

        Raises SandboxUnavailable with bwrap's own words when it refuses. Cancelled, it leaves nothing.
        """
        info_read, info_write = os.pipe()
        try:
            pipe = asyncio.subprocess.PIPE
            bwrap = await start_process(
                _launch_argv(plan, info_write), stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=(info_write,)
            )
        except BaseException:
            os.close(info_read)
            raise
        finally:
            os.close(info_write)
        try:
            async with asyncio.timeout(_START_LIMIT):
                await _await_ready(bwrap)
            init_pid = int(json.loads(os.read(info_read, 4096))["child-pid"])
            proc_fd = os.open(f"/proc/{init_pid}", os.O_PATH | os.O_DIRECTORY)
        except BaseException:
            await finish(kill_group(bwrap))
            bwrap.close()
            raise
        finally:
            os.close(info_read)
        return cls(plan, bwrap, init_pid, proc_fd)

    @property
    def init_pid(self) -> int:
        """Host pid of process 1 inside."""
        return self._init_pid

    def alive(self) -> bool:
        """Whether process 1 still runs (a zombie does not: by then the kernel has ended all others)."""
        if self._proc_fd < 0:
            return False
        try:
            fd = os.open("stat", os.O_RDONLY, dir_fd=self._proc_fd)
            try:
                return os.read(fd, 4096).rpartition(b")")[2].split()[0] not in (b"Z", b"X")
            finally:
                os.close(fd)
        except OSError:
            return False

    async def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        stdin: IO[bytes] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - the command inside has to be killed
        limit: int = 10_000_000,
        stdout_sink: Callable[[bytes], None] | None = None,
    ) -> Completed:
        """Run `argv` inside with `env` and a mark; see `run_bounded`. Raises SandboxError when not alive.

        On a timeout, an error or a cancellation everything that still carries the command's mark is killed
        too, so that a child in a session of its own does not go on. (A process that wiped its environment
        is only ended by `kill`.)
        """
        if not self.alive():
            raise SandboxError("the sandbox is not running: it was stopped, or its first process was killed")
        mark = f"{_MARK}={secrets.token_hex(8)}"
        # nsenter and setpriv still run with rights of the harness: the linker must not obey the caller there.
        late = [f"{name}={value}" for name, value in env.items() if name.startswith(_LINKER)]
        early = {name: value for name, value in env.items() if not name.startswith(_LINKER)}
        command = [*self._enter(), "/usr/bin/env", *late, mark, *argv]
        ended = False
        try:
            done = await run_bounded(
                command, env=early, stdin=stdin, timeout=timeout, limit=limit, stdout_sink=stdout_sink
            )
            ended = not done.timed_out
            return done
        finally:
            if not ended:
                await finish(asyncio.to_thread(_kill_marked, mark.encode()))

    async def forbid_user_namespaces(self) -> None:
        """Unprivileged harness: no further user namespaces inside (for root, bwrap itself sees to it).

        Best effort: a smaller attack surface, not a wall. Only a process with capabilities in the sandbox's
        user namespace may change the limit back, and nothing inside has any.
        """
        enter = [host_tool("nsenter"), f"--user={self._ns('user')}", "--preserve-credentials"]
        await run_bounded([*enter, "/bin/sh", "-c", "echo 0 > /proc/sys/user/max_user_namespaces"], limit=1000)

    async def kill(self) -> None:
        """End every process inside, however it detached itself, and wait for that. Idempotent.

        Killing process 1 makes the kernel kill all the others before process 1 counts as dead.
        """
        if self._proc_fd < 0:
            return
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(self._init_pid)
            try:
                if self.alive():  # so the descriptor is this process's and not a later one's
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._bwrap.pid, signal.SIGKILL)
        await self._bwrap.wait()
        while self.alive():  # noqa: ASYNC110 - another parent's child: there is no event to wait for
            await asyncio.sleep(0.002)
        self._bwrap.close()
        os.close(self._proc_fd)
        self._proc_fd = -1

    def _ns(self, kind: str) -> str:
        return f"/proc/{os.getpid()}/fd/{self._proc_fd}/ns/{kind}"

    def _enter(self) -> list[str]:
        kinds = {"user": "user", "mount": "mnt", "pid": "pid", "net": "net", "ipc": "ipc", "uts": "uts"}
        limits = self._plan.limits
        return [
            *_killed_first(),
            host_tool("nsenter"),
            *(f"--{option}={self._ns(kind)}" for option, kind in kinds.items()),
            *(["--preserve-credentials"] if self._plan.uid is None else ["-S", "0", "-G", "0"]),
            "--",
            # Entering a user namespace gives all capabilities in it.
            *(host_tool("setpriv"), "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"),
            *(host_tool("prlimit"), f"--nproc={limits.processes}", f"--fsize={limits.file_bytes}"),
            *(f"--data={limits.data_bytes}", "--core=0", "--"),
        ]


def _killed_first() -> list[str]:
    """Out of memory, the kernel ends an agent's processes and not the harness or the trainer beside them.

    Against accidents: a process inside can set its own value back to 0.
    """
    return [host_tool("choom"), "-n", "800", "--"]


def _launch_argv(plan: Plan, info_fd: int) -> list[str]:
    argv: list[str] = []
    if plan.staged:
        pairs = [word for pair in plan.staged for word in pair]
        argv += [host_tool("unshare"), "--mount", "--propagation", "private", "--"]
        argv += ["/bin/sh", "-c", _STAGE, "deskrl-stage", *pairs, "--"]
    if plan.uid is not None:
        argv += [host_tool("setpriv"), f"--reuid={plan.uid}", f"--regid={plan.uid}", "--clear-groups", "--"]
    argv += [*_killed_first(), plan.bwrap, "--unshare-user", "--uid", "0", "--gid", "0", "--cap-drop", "ALL"]
    if plan.uid is not None:
        argv += ["--disable-userns"]
    argv += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    argv += ["--hostname", "sandbox", "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"]
    for name, value in plan.environment.items():
        argv += ["--setenv", name, value]
    argv += [*plan.mounts, "--chdir", "/", "--info-fd", str(info_fd)]
    return [*argv, "--", "/bin/bash", "-c", _INIT, plan.tag]


def _kill_marked(mark: bytes) -> None:
    """SIGKILL every process whose environment holds `mark`, until none is found."""
    for _ in range(_KILL_ROUNDS):
        found = False
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(int(name))  # first, so that the check is about the process it names
                try:
                    with open(f"/proc/{name}/environ", "rb") as environ:
                        if mark in environ.read().split(b"\0"):
                            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                            found = True
                finally:
                    os.close(pidfd)
        if not found:
            return


async def _await_ready(bwrap: Child) -> None:
    """Wait until process 1 itself says that it runs.

    bwrap reports that process's pid before it has changed the root, so the report alone proves nothing.
    """
    assert bwrap.stdout is not None and bwrap.stderr is not None
    if (await bwrap.stdout.readline()).decode(errors="replace").strip() == _READY:
        return
    said = (await bwrap.stderr.read(10_000)).decode(errors="replace").strip() or "nothing"
    raise SandboxUnavailable(
        f"bubblewrap could not start a sandbox; it said: {said}. Run `deskrl doctor` to see what this host "
        "lacks (most often user namespaces, forbidden by sysctl, AppArmor or a container's seccomp profile)"
    )
