"""Nothing stays behind: after a stop, after a start that was cancelled or failed, after a harness that was killed."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sandbox_helpers import Start, folders, make_environment, open_descriptors, wait_until_dead

from deskrl.sandbox.bubblewrap import BubblewrapEnvironment
from deskrl.sandbox.errors import SandboxError, SandboxUnavailable
from deskrl.sandbox.sweep import live_sandboxes, sandbox_processes, sweep

# Detached every way a process can be, and hard to remove.
_MESS = (
    "setsid --fork sleep 5555; (setsid nohup sleep 5555 &); (env -i setsid sleep 5555 &) ; "
    "mkdir -p /app/locked/deep && chmod 0 /app/locked; chmod 0 /root /tmp"
)


def _uid_is_free(uid: int) -> bool:
    with open(f"/run/deskrl-uids/{uid}.lock", "r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


async def test_stop_leaves_no_process_folder_uid_or_descriptor(tmp_path: Path, scratch: Path) -> None:
    before = open_descriptors()
    environment = make_environment(tmp_path, scratch)
    await environment.start()
    await environment.exec(_MESS)
    folder, uid = folders(scratch)[0], environment.host_uid
    assert len(sandbox_processes(folder)) >= 2
    if os.geteuid() == 0:
        assert len(sandbox_processes(folder)) >= 5 and not _uid_is_free(uid)
    await asyncio.gather(environment.stop(), environment.stop())
    await environment.stop()
    assert sandbox_processes(folder) == [] and folders(scratch) == []
    assert os.geteuid() != 0 or _uid_is_free(uid)
    assert open_descriptors() <= before
    with pytest.raises(SandboxError, match="not running"):
        await environment.exec("true")


async def test_a_stopped_sandbox_can_be_started_again(tmp_path: Path, scratch: Path) -> None:
    environment = make_environment(tmp_path, scratch)
    for _ in range(2):
        await environment.start()
        with pytest.raises(SandboxError, match="started already"):
            await environment.start()
        assert (await environment.exec("echo $HOME; echo x >/app/left; ls /app")).stdout == "/root\nleft\n"
        await environment.quiesce()
        await environment.stop()
    assert folders(scratch) == []


async def test_stop_without_delete_keeps_the_files_from_every_sweep(tmp_path: Path, scratch: Path) -> None:
    environment = make_environment(tmp_path, scratch)
    await environment.start()
    await environment.exec("echo kept >/app/result")
    path, folder = environment.sandbox_path, folders(scratch)[0]
    await environment.stop(delete=False)
    assert sandbox_processes(folder) == []
    assert await asyncio.to_thread(sweep, scratch) == []
    assert (path / "app" / "result").read_text() == "kept\n"


async def test_a_cancelled_stop_is_completed_first(tmp_path: Path, scratch: Path) -> None:
    environment = make_environment(tmp_path, scratch)
    await environment.start()
    folder = folders(scratch)[0]
    task = asyncio.create_task(environment.stop())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sandbox_processes(folder) == [] and folders(scratch) == []


async def test_a_start_cancelled_at_any_moment_leaves_nothing(tmp_path: Path, scratch: Path) -> None:
    world = tmp_path / "world"
    (world / "filesystem").mkdir(parents=True)
    (world / "filesystem" / "file").write_bytes(b"x" * 1_000_000)
    before, cancelled = open_descriptors(), 0
    for number in range(25):
        environment = make_environment(tmp_path / str(number), scratch, world_dir=world, run_id="cancelled")
        task = asyncio.create_task(environment.start())
        await asyncio.sleep(number * 0.003)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            cancelled += 1
        await environment.stop()
    assert cancelled > 0
    assert folders(scratch) == [] and list(scratch.glob("cancelled-*")) == []
    commands = [path.read_bytes() for path in _command_lines()]
    assert [line for line in commands if str(scratch).encode() in line] == []
    assert open_descriptors() <= before


def _command_lines() -> list[Path]:
    return [path / "cmdline" for path in Path("/proc").iterdir() if path.name.isdigit() and (path / "cmdline").exists()]


async def test_a_failing_start_names_the_cause_and_leaves_nothing(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = scratch / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: no user namespaces here' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("DESKRL_BWRAP", str(broken))
    environment = make_environment(tmp_path, scratch)
    with pytest.raises(SandboxUnavailable, match=r"it said: bwrap: no user namespaces here\. Run `deskrl doctor`"):
        await environment.start()
    assert folders(scratch) == []


async def test_quiesce_ends_all_processes_and_wipes_what_grading_reads(start: Start) -> None:
    environment = await start()
    await environment.exec(
        "setsid --fork bash -c 'while :; do echo 42 >/logs/verifier/reward.txt; sleep 0.01; done'; "
        "mkdir -p /tests; echo exit 0 >/tests/test.sh; chmod 0 /tests; echo work >/app/answer; "
        "rm -rf /logs/agent; ln -s /logs/verifier /logs/agent; touch /run/deskrl/.hidden; "
        "mkdir -p ~/.local && echo evil >~/.bash_profile"
    )
    await environment.quiesce()
    done = await environment.exec("ls -A /logs/verifier /run/deskrl $HOME; ls -d /tests /logs/agent; cat /app/answer")
    assert (done.stdout or "").split() == ["/logs/verifier:", "/run/deskrl:", "home", "/run/deskrl/home:", "work"]
    seen = await environment.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert "reward.txt" not in (seen.stdout or "")
    await environment.quiesce()
    assert (await environment.exec("cat /app/answer")).stdout == "work\n"


async def test_a_sandbox_whose_first_process_dies_is_an_error_not_a_hang(start: Start) -> None:
    environment = await start()
    namespace = environment._namespace
    assert namespace is not None
    os.kill(namespace.init_pid, signal.SIGKILL)
    while namespace.alive():
        await asyncio.sleep(0.01)
    with pytest.raises(SandboxError, match="not running"):
        await environment.exec("true")


async def test_many_start_and_stop_at_once(tmp_path: Path, scratch: Path) -> None:
    async def one(number: int) -> int:
        environment: BubblewrapEnvironment = make_environment(tmp_path / str(number), scratch)
        await environment.start()
        try:
            assert (await environment.exec(f"echo {number}")).stdout == f"{number}\n"
            return environment.host_uid
        finally:
            await environment.stop()

    uids = await asyncio.gather(*(one(number) for number in range(12)))
    assert folders(scratch) == [] and (os.geteuid() != 0 or len(set(uids)) == 12)


_HARNESS = """
import asyncio, sys
from pathlib import Path
from sandbox_helpers import make_environment
async def main():
    environment = make_environment(Path(sys.argv[1]), Path(sys.argv[2]))
    await environment.start()
    await environment.exec("setsid --fork sleep 6666; (env -i setsid sleep 6666 &)")
    print("ready", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def test_a_killed_harness_takes_its_processes_along_and_sweep_removes_the_rest(tmp_path: Path, scratch: Path) -> None:
    command = [sys.executable, "-c", _HARNESS, str(tmp_path), str(scratch)]
    harness = subprocess.Popen(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True)
    assert harness.stdout is not None and harness.stdout.readline() == "ready\n"
    folder = folders(scratch)[0]
    assert [live.path for live in live_sandboxes(scratch)] == [folder.path]
    assert sweep(scratch) == [], "a living harness's sandbox is not swept"
    assert len(sandbox_processes(folder)) >= 2
    harness.kill()
    harness.wait()
    harness.stdout.close()
    assert wait_until_dead(folder) == []
    assert live_sandboxes(scratch) == [] and folder.path.exists()
    with ThreadPoolExecutor() as pool:  # as a harness whose loop runs already would call it
        assert pool.submit(sweep, scratch).result() == [str(folder.path)]
    assert not folder.path.exists() and sweep(scratch) == []
    if folder.owner.uid is not None:
        assert _uid_is_free(folder.owner.uid)
