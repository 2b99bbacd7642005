"""harbor environment without Docker: one bubblewrap sandbox per trial.

Its own user, PID, network (loopback only), IPC, UTS and mount namespaces; a host uid of its own when the
harness is root; no capabilities; no host files but /usr, a made-up /etc and the harness's Python. The world
is reached from outside through a Unix socket in a folder that both sides see.

Invariants: `stop` leaves no process, no folder and no uid behind, also after a failed or cancelled `start`.
After `quiesce` nothing that the agent started or left in /logs/verifier or /tests exists any more. A file
that the harness wrote into the trial's agent folder is never replaced by one from inside.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, override

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.utils.path_filter import filter_paths_by_patterns

from deskrl.sandbox.endpoint import WorldEndpoint
from deskrl.sandbox.errors import SandboxError
from deskrl.sandbox.layout import Layout, write_etc
from deskrl.sandbox.namespace import Limits, Namespace, Plan
from deskrl.sandbox.processes import Completed, finish, run_host
from deskrl.sandbox.runtime import python_executable, python_folders, require_tools, usable_bwrap
from deskrl.sandbox.scratch import (
    SOCKET_NAME,
    SandboxFolder,
    default_scratch_root,
    others_can_enter,
    prepare_root,
)
from deskrl.sandbox.transfer import SizeGate, merge, pack, unpack
from deskrl.sandbox.uids import UidLease, lease_uid

_WORLD = {"filesystem": "/filesystem", "apps_data": "/.apps_data", "app": "/app"}
# $1: the world, $2: the sandbox's folder, $3: owner or nothing, then names of folders.
_COPY = (
    'world=$1; cd -- "$2" || exit; owner=$3; shift 3; '
    'for name; do cp -a --reflink=auto --no-preserve=ownership -- "$world/$name/." "$name" || exit; done; '
    'chmod -R u+rwX -- "$@" && { [ -z "$owner" ] || chown -R -h -- "$owner" "$@"; }'
)
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_IN_CWD = 'cd -- "$1" && exec /bin/bash -c "$2"'
_SPAWN = 'cd / && mkdir -p "$(dirname "$2")" && exec setsid --fork /bin/bash -c "$1" >"$2" 2>&1 </dev/null'
# Everything the agent could have prepared for the grader outside the folders that are its work.
_WIPE = (
    "chmod -R u+rwX /tests /logs /run/deskrl 2>/dev/null;"
    # A link there would send the harness's uploads, agent logs say, to a place of the agent's choice.
    "find /logs -mindepth 1 -maxdepth 1 ! -type d -delete && "
    "rm -rf /tests /logs/verifier /run/deskrl/* /run/deskrl/.[!.]* && mkdir -p -m 777 /logs/verifier && "
    "mkdir -m 700 /run/deskrl/home"
)
_MAX_OUTPUT = 10_000_000
_MAX_DOWNLOAD = 2 << 30
_TRANSFER_TIMEOUT = 600.0
_OWN_KWARGS = ("world_dir", "scratch_dir", "run_id", "trusted_agent_files")


class BubblewrapEnvironment(BaseEnvironment):
    """A bubblewrap sandbox as a harbor environment (`deskrl.sandbox.bubblewrap:BubblewrapEnvironment`).

    world_dir: host folder whose `filesystem`, `apps_data` and `app` become private writable copies at
        /filesystem, /.apps_data and /app.
    scratch_dir: where sandboxes keep their files on the host; a short path. run_id: names the folders.
    trusted_agent_files: names directly in /logs/agent that only the harness may write, never the sandbox.
        Pass an empty list for an agent that runs inside and writes its own trajectory there.

    Raises TypeError for an unknown keyword, ValueError for a world or a mount that cannot be.
    """

    def __init__(
        self,
        *args: Any,
        world_dir: str | Path | None = None,
        scratch_dir: str | Path | None = None,
        run_id: str | None = None,
        trusted_agent_files: Sequence[str] = ("trajectory.json",),
        **kwargs: Any,
    ) -> None:
        _reject_unknown(kwargs)
        self._world = Path(world_dir).absolute() if world_dir is not None else None
        if self._world is not None and not any((self._world / name).is_dir() for name in _WORLD):
            raise ValueError(
                f"world_dir {self._world} holds none of the folders {', '.join(_WORLD)}: point it at a world directory"
            )
        self._scratch_root = Path(scratch_dir) if scratch_dir is not None else default_scratch_root()
        self._run_id = run_id
        self._trusted = frozenset(trusted_agent_files)
        self._folder: SandboxFolder | None = None
        self._lease: UidLease | None = None
        self._plan: Plan | None = None
        self._namespace: Namespace | None = None
        self._grading = False
        self._lifecycle = asyncio.Lock()
        self._fetched: dict[Path, tuple[int, int]] = {}
        super().__init__(*args, **kwargs)
        foreign = [target for target in self._mount_targets() if not target.startswith("/logs/")]
        if foreign:
            raise ValueError(f"the bubblewrap environment has no host mounts; remove {', '.join(foreign)}")

    @staticmethod
    @override
    def type() -> str:
        return "bubblewrap"

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True, mounted=False)

    @override
    def _validate_definition(self) -> None:
        """Nothing is built, so a task needs no Dockerfile; one that is there is not used."""

    @property
    def world_endpoint(self) -> WorldEndpoint:
        """Where the harness reaches a server that listens on $DESKRL_WORLD_SOCKET inside."""
        return WorldEndpoint("http://world", str(self._require_folder().socket))

    @property
    def sandbox_path(self) -> Path:
        """The sandbox's folder on the host."""
        return self._require_folder().path

    @property
    def host_uid(self) -> int:
        """The host uid that uid 0 inside stands for; never 0."""
        return self._lease.uid if self._lease is not None else os.geteuid()

    # -- lifecycle

    @override
    async def start(self, force_build: bool = False) -> None:
        """Make the sandbox and copy the world into it. `force_build` has no meaning here.

        Raises SandboxUnavailable (the host cannot), SandboxError or OSError (this one failed).
        """
        async with self._lifecycle:
            if self._folder is not None:
                raise SandboxError("this sandbox was started already")
            try:
                await self._boot()
            except BaseException:
                await finish(self._tear_down(delete=True))
                raise

    async def _boot(self) -> None:
        require_tools()
        root = prepare_root(self._scratch_root)
        if os.geteuid() == 0:
            self._lease = lease_uid()
        uid = self._lease.uid if self._lease else None
        self._folder = folder = SandboxFolder.create(root, self._run_id, uid)
        await finish(asyncio.to_thread(write_etc, folder.path / "etc"))
        await self._copy_world(folder, uid)
        self._plan = await finish(asyncio.to_thread(self._make_plan, folder, uid))
        self._namespace = await self._launch()
        await self._upload_task_files()

    async def _copy_world(self, folder: SandboxFolder, uid: int | None) -> None:
        if self._world is None:
            return
        names = [name for name in _WORLD if (self._world / name).is_dir()]
        for name in names:
            (folder.path / name).mkdir(mode=0o700, exist_ok=True)
        owner = "" if uid is None else f"{uid}:{uid}"
        words = [str(self._world), str(folder.path), owner, *names]
        await run_host(["/bin/sh", "-c", _COPY, "deskrl-copy", *words])
        start = folder.path / "app" / "tools" / "start.sh"
        if start.is_file() and not start.is_symlink():
            start.chmod(0o755)

    def _make_plan(self, folder: SandboxFolder, uid: int | None) -> Plan:
        names = {"/app": "app", "/root": "home", "/tmp": "tmp", "/logs": "logs", "/run/deskrl": "run"}
        for name, inside in _WORLD.items():
            if (folder.path / name).is_dir():
                names[inside] = name
        borrowed, staged = python_folders(), []
        for number, (inside, host) in enumerate(borrowed.items()):
            if uid is not None and not others_can_enter(Path(host)):
                point = folder.path / "stage" / str(number)
                point.mkdir(mode=0o755)
                staged.append((host, str(point)))
                borrowed[inside] = str(point)
        writable = {inside: folder.path / name for inside, name in names.items()}
        memory_mb = self.task_env_config.memory_mb or 0
        return Plan(
            bwrap=str(usable_bwrap(folder.path.parent)),
            mounts=Layout(folder.path / "root", folder.path / "etc", writable, borrowed).arguments(),
            environment=self._base_env(),
            uid=uid,
            staged=staged,
            tag=f"deskrl-sandbox:{folder.owner.sandbox_id}",
            limits=Limits(data_bytes=max(Limits.data_bytes, memory_mb << 20)),
        )

    async def _launch(self) -> Namespace:
        assert self._plan is not None
        namespace = await Namespace.launch(self._plan)
        if self._plan.uid is None:
            try:
                await namespace.forbid_user_namespaces()
            except BaseException:
                await finish(namespace.kill())
                raise
        return namespace

    async def _upload_task_files(self) -> None:
        """A task's environment folder goes to the working directory, as harbor does for prebuilt images."""
        folder = self.environment_dir
        if folder.is_dir() and any(folder.iterdir()) and not (folder / "Dockerfile").exists():
            await self.upload_dir(folder, self._cwd(None))

    @override
    async def stop(self, delete: bool = True) -> None:
        """End every process, free the uid and remove the files (without `delete` they stay for good). Idempotent.

        A cancellation meanwhile takes effect only once that is done.
        """
        await finish(self._stop(delete))

    async def _stop(self, delete: bool) -> None:
        async with self._lifecycle:
            await self._tear_down(delete)

    async def _tear_down(self, delete: bool) -> None:
        # Should the kill fail, the uid stays leased: another sandbox must not share it with what is left.
        if self._namespace is not None:
            await self._namespace.kill()
            self._namespace = None
        self._grading = False
        try:
            if self._folder is not None:
                await (self._folder.remove() if delete else self._folder.keep())
                self._folder = None
        finally:
            if self._lease is not None:
                self._lease.release()
                self._lease = None

    async def quiesce(self) -> None:
        """Make the sandbox fit for grading: kill all processes inside, empty /logs/verifier, remove /tests.

        All namespaces are replaced, process 1 included (the agent could have taken it over with ptrace), on
        the same files. From then on commands have an empty HOME and no user site-packages. The world's server
        is dead afterwards too; its socket is gone. Raises SandboxError.
        """
        async with self._lifecycle:
            self._require_folder()
            if self._namespace is not None:
                await finish(self._namespace.kill())
                self._namespace = None
            self._namespace, self._grading = await self._launch(), True
            await self._checked(_WIPE, "clean up before grading")

    # -- commands

    def _base_env(self) -> dict[str, str]:
        own = {
            "PATH": _PATH,
            "HOME": "/root",
            "LANG": "C.UTF-8",
            "TMPDIR": "/tmp",
            "PYTHONDONTWRITEBYTECODE": "1",
            "DESKRL_PYTHON": python_executable(),
            "DESKRL_WORLD_SOCKET": f"/run/deskrl/{SOCKET_NAME}",
        }
        if self._grading:
            own |= {"HOME": "/run/deskrl/home", "PYTHONNOUSERSITE": "1"}
        return own

    def _cwd(self, cwd: str | None) -> str:
        return cwd or self.task_env_config.workdir or "/app"

    def _require_folder(self) -> SandboxFolder:
        if self._folder is None:
            raise SandboxError("the sandbox is not running: call start() first")
        return self._folder

    async def _run(self, argv: Sequence[str], env: dict[str, str] | None = None, **kwargs: Any) -> Completed:
        if self._namespace is None:
            raise SandboxError("the sandbox is not running: call start() first")
        return await self._namespace.run(argv, {**self._base_env(), **(env or {})}, **kwargs)

    async def _checked(self, script: str, purpose: str, *words: str, **kwargs: Any) -> Completed:
        """Run a harness's own script inside; raises SandboxError naming `purpose` when it fails."""
        done = await self._run(["/bin/bash", "-c", script, "deskrl", *words], timeout=_TRANSFER_TIMEOUT, **kwargs)
        if done.returncode:
            text = done.stderr.decode(errors="replace").strip()[-2000:]
            raise SandboxError(f"could not {purpose} in the sandbox: status {done.returncode}: {text}")
        return done

    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a bash command; at most 10 MB of each output stream are kept, with a note about the rest.

        Past `timeout_sec` seconds it is killed and the status is 124. There is one user inside, called root
        and powerless; asking for another raises ValueError.
        """
        _only_root(self._resolve_user(user))
        done = await self._run(
            ["/bin/bash", "-c", _IN_CWD, "deskrl-exec", self._cwd(cwd), command],
            self._merge_env(env),
            timeout=timeout_sec,
            limit=_MAX_OUTPUT,
        )
        errors = done.stderr.decode(errors="replace")
        if done.timed_out:
            errors += f"\n[deskrl: killed after {timeout_sec} s]\n"
        return ExecResult(stdout=done.stdout.decode(errors="replace"), stderr=errors, return_code=done.returncode)

    async def spawn(self, command: str, log_path: str, env: dict[str, str] | None = None) -> None:
        """Start a bash command in /, in the background, its output in `log_path` inside; returns at once.

        It runs until it ends, `quiesce` or `stop`. Raises SandboxError when it cannot be started.
        """
        await self._checked(_SPAWN, f"start {command!r}", command, log_path, env=self._merge_env(env))

    # -- transfers

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy one host file in; raises SandboxError or OSError."""
        target = PurePosixPath(target_path)
        await self._upload(Path(source_path), target.name, str(target.parent))

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copy a host folder's contents in, over what is there; raises SandboxError or OSError."""
        await self._upload(Path(source_dir), ".", target_dir)

    async def _upload(self, source: Path, name: str, target: str) -> None:
        archive = await finish(asyncio.to_thread(pack, source, name))
        with archive:
            script = 'mkdir -p -- "$1" && exec tar -xf - --no-same-owner -C "$1"'
            await self._checked(script, f"upload {source} to {target}", target, stdin=archive)

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy one file out; raises SandboxError when it is missing, not a plain file, or over 2 GiB."""
        source, target = PurePosixPath(source_path), Path(target_path)
        with tempfile.TemporaryDirectory() as temporary:
            unpacked = await self._fetch(str(source.parent), source.name, Path(temporary))
            if not (unpacked / source.name).is_file():
                raise SandboxError(f"{source_path} in the sandbox is not a plain file")
            named = unpacked.rename(Path(temporary) / "file")
            (named / source.name).rename(named / target.name)
            await finish(asyncio.to_thread(self._merge_out, named, target.parent))

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy a folder's plain files out (2 GiB at most), over existing ones but for the harness's own."""
        await self._download(source_dir, Path(target_dir))

    @override
    async def download_dir_with_exclusions(
        self, *, source_dir: str, target_dir: Path | str, exclude: list[str]
    ) -> None:
        """As download_dir, without what tar's `--exclude` patterns match."""
        await self._download(source_dir, Path(target_dir), [f"--exclude={pattern}" for pattern in exclude])

    @override
    async def download_dir_filtered(
        self,
        *,
        source_dir: str,
        target_dir: Path | str,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        protect: Sequence[str] | None = None,
    ) -> None:
        """As download_dir, for the paths that harbor's include/exclude patterns select, plus `protect`."""

        def selected(paths: list[str]) -> set[str]:
            return set(filter_paths_by_patterns(paths, include=include, exclude=exclude)) | set(protect or ())

        await self._download(source_dir, Path(target_dir), select=selected)

    async def _download(
        self,
        source: str,
        target: Path,
        options: Sequence[str] = (),
        select: Callable[[list[str]], set[str]] | None = None,
    ) -> None:
        with tempfile.TemporaryDirectory() as temporary:
            unpacked = await self._fetch(source, ".", Path(temporary), options)
            if select is not None:
                files = [path for path in unpacked.rglob("*") if path.is_file()]
                chosen = select([path.relative_to(unpacked).as_posix() for path in files])
                for path in files:
                    if path.relative_to(unpacked).as_posix() not in chosen:
                        path.unlink()
            await finish(asyncio.to_thread(self._merge_out, unpacked, target))

    async def _fetch(self, folder: str, name: str, temporary: Path, options: Sequence[str] = ()) -> Path:
        unpacked = temporary / "unpacked"
        unpacked.mkdir()
        with tempfile.TemporaryFile() as archive:
            argv = ["/usr/bin/env", "tar", "-cf", "-", *options, "-C", folder, "--", name]
            gate = SizeGate(archive, _MAX_DOWNLOAD, f"{folder}/{name}")
            done = await self._run(argv, timeout=_TRANSFER_TIMEOUT, stdout_sink=gate)
            # Status 1: a file changed while it was read, which a living world may do.
            if done.returncode not in (0, 1):
                text = done.stderr.decode(errors="replace").strip()[-2000:]
                raise SandboxError(f"could not download {folder}/{name} from the sandbox: {text}")
            await finish(asyncio.to_thread(unpack, archive, unpacked, _MAX_DOWNLOAD))
        return unpacked

    def _merge_out(self, unpacked: Path, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        for path in merge(unpacked, target, self._is_harness_file):
            info = path.stat()
            self._fetched[path.absolute()] = (info.st_mtime_ns, info.st_size)

    def _is_harness_file(self, path: Path) -> bool:
        """Whether the sandbox must not write this host file: it is in the trial's agent folder, and reserved
        or there already without being an earlier, unchanged download."""
        path, agent_dir = path.absolute(), self.trial_paths.agent_dir.absolute()
        if not path.is_relative_to(agent_dir):
            return False
        if path.parent == agent_dir and path.name in self._trusted:
            return True
        if not path.exists():
            return False
        info = path.stat()
        return self._fetched.get(path) != (info.st_mtime_ns, info.st_size)


def _only_root(user: str | int | None) -> None:
    if user not in (None, "root", 0, "0"):
        raise ValueError(
            f"user {user!r} does not exist in a bubblewrap sandbox, which has one user, root (powerless): "
            "remove `user` from the task's [agent] or [verifier]"
        )


def _reject_unknown(kwargs: dict[str, Any]) -> None:
    """harbor hands unknown keywords through silently, so a typo would pass for a setting."""
    known = [name for name in inspect.signature(BaseEnvironment.__init__).parameters if name != "self"]
    known = [name for name in known if name not in ("args", "kwargs")] + list(_OWN_KWARGS)
    for name in kwargs:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(
                f"unknown environment keyword {name!r} for the bubblewrap environment{hint} "
                f"(known: {', '.join(_OWN_KWARGS)})"
            )
