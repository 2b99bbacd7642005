"""What a hostile agent finds inside a real sandbox: no host, no network, no rights, no secrets."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
from sandbox_helpers import Start

import deskrl
from deskrl.sandbox.bubblewrap import BubblewrapEnvironment
from deskrl.sandbox.runtime import python_folders
from deskrl.sandbox.sweep import sandbox_processes

_PYTHON = '"$DESKRL_PYTHON" -c'


async def _out(environment: BubblewrapEnvironment, command: str) -> str:
    return ((await environment.exec(command)).stdout or "").strip()


async def test_host_files_are_not_there(start: Start, tmp_path: Path) -> None:
    environment = await start()
    (tmp_path / "secret").write_text("x")
    package = Path(deskrl.__file__).parent
    hidden = ["/etc/shadow", "/etc/ssh", "/home", "/sys", "/boot", "/var/log", "/proc/kcore", str(tmp_path)]
    hidden += [str(package.parents[1] / name) for name in (".git", "pyproject.toml", "tests", "README.md")]
    probe = "head -c1 {0} 2>/dev/null; ls -d {0}/ 2>/dev/null"
    found = await _out(environment, "; ".join(probe.format(path) for path in hidden))
    assert found == ""
    # The harness's Python may lie below /root: then the way to it is there, and nothing else.
    at_root = {Path(path).relative_to("/root").parts[0] for path in _borrowed() if path.startswith("/root/")}
    assert set((await _out(environment, "ls -A /root")).split()) == at_root


def _borrowed() -> list[str]:
    return list(python_folders())


async def test_what_the_harness_runs_inside_cannot_be_replaced(start: Start) -> None:
    environment = await start()
    package = str(Path(deskrl.__file__).parent)
    targets = ["/usr/bin/env", "/bin/bash", "/etc/passwd", "/etc/ld.so.preload", f"{package}/__init__.py"]
    for target in targets:
        done = await environment.exec(f"echo evil >>{target}")
        assert done.return_code != 0, target
    for folder in ["/usr", "/bin", "/etc", "/logs", "/run", "/" + package.split("/")[1], *_borrowed()]:
        done = await environment.exec(f"mv {folder} {folder}.moved || rmdir {folder} || umount {folder}")
        assert done.return_code != 0, folder
    assert await _out(environment, f"{_PYTHON} 'import deskrl; print(deskrl.__file__)'") == deskrl.__file__


async def test_nothing_inside_has_a_capability_or_can_get_one(start: Start) -> None:
    environment = await start()
    await environment.spawn("sleep 1000", "/tmp/log")
    status = await _out(environment, "cat /proc/[0-9]*/status | grep -E '^(Cap|NoNewPrivs)' | tr -d '\\t' | sort -u")
    assert set(status.split()) == {
        *(f"Cap{kind}:{0:016x}" for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")),
        "NoNewPrivs:1",
    }
    for command in ("unshare --user true", "unshare --mount true", "mount -t tmpfs none /tmp", "chroot / true"):
        assert (await environment.exec(command)).return_code != 0, command


_WRITE_BACK = """
import os
for top in ("/proc/sys", "/proc/irq", "/proc/bus", "/proc/fs"):
    for base, _, names in os.walk(top):
        for name in names:
            path = os.path.join(base, name)
            try:
                fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
                os.write(fd, os.read(fd, 4096))
            except OSError:
                continue
            print(path)
"""


async def test_global_kernel_settings_cannot_be_written(start: Start) -> None:
    environment = await start()
    written = (await _out(environment, f"{_PYTHON} '{_WRITE_BACK}'")).split()
    # Some settings belong to the sandbox's own network, IPC and PID namespaces and die with them.
    own = ("net/", "kernel/shm", "kernel/msg", "kernel/auto_msgmni", "kernel/sem", "kernel/pid_max", "fs/mqueue/")
    assert [path for path in written if not path.startswith(tuple(f"/proc/sys/{name}" for name in own))] == []
    limit = Path("/proc/sys/kernel/pid_max")
    before = limit.read_text()
    await environment.exec(f"echo 1000 >{limit}")
    assert limit.read_text() == before
    for path in ("sys/kernel/core_pattern", "sys/vm/overcommit_memory", "1/oom_score_adj", "sysrq-trigger"):
        assert (await environment.exec(f"echo -17 >/proc/{path}")).return_code != 0, path


async def test_only_its_own_processes_are_seen(start: Start) -> None:
    environment, other = await start(), await start()
    await other.spawn("sleep 424242", "/tmp/log")
    seen = await _out(environment, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert "424242" not in seen and "pytest" not in seen
    assert len((await _out(environment, "ls -d /proc/[0-9]*")).split()) < 6
    if os.geteuid() == 0:
        assert environment.host_uid != other.host_uid
        pids = sandbox_processes(environment._require_folder())
        assert pids and {os.stat(f"/proc/{pid}").st_uid for pid in pids} == {environment.host_uid}


async def test_no_variable_of_the_host_is_visible(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DESKRL_TEST_API_KEY", "sk-hunter2")
    environment = await start()
    await environment.spawn("sleep 1000", "/tmp/log")
    for _ in range(2):
        visible = await _out(environment, "cat /proc/[0-9]*/environ | tr '\\0' '\\n' | sort -u")
        names = {line.split("=", 1)[0] for line in visible.splitlines()}
        assert "PATH" in names and "hunter2" not in visible
        own = {"PATH", "HOME", "LANG", "TMPDIR", "PYTHONDONTWRITEBYTECODE", "PYTHONNOUSERSITE", "DESKRL_EXEC"}
        assert names <= own | {"DESKRL_PYTHON", "DESKRL_WORLD_SOCKET", "PWD", "OLDPWD", "SHLVL", "_"}
        await environment.quiesce()


async def test_a_linker_variable_of_a_command_is_obeyed_only_inside(start: Start, scratch: Path) -> None:
    environment = await start()
    done = await environment.exec("echo $LD_LIBRARY_PATH $OTHER", env={"LD_LIBRARY_PATH": "/x", "OTHER": "y"})
    assert (done.stdout or "").strip() == "/x y"
    # Applied before the sandbox is entered, this would make nsenter list its libraries and not run at all.
    done = await environment.exec("echo ran >/tmp/ran", env={"LD_TRACE_LOADED_OBJECTS": "1"})
    assert "setns" not in (done.stdout or "") and "nsenter" not in (done.stderr or "")
    assert (await environment.exec("true")).return_code == 0


async def test_there_is_no_network_but_loopback(start: Start) -> None:
    environment = await start()
    assert await _out(environment, "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '") == "lo"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert (await environment.exec(f"exec 3<>/dev/tcp/127.0.0.1/{port}")).return_code != 0
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\0deskrl-test-abstract")
    abstract.listen()
    connect = "import socket; socket.socket(socket.AF_UNIX).connect(chr(0) + 'deskrl-test-abstract')"
    assert (await environment.exec(f'{_PYTHON} "{connect}"')).return_code != 0
    abstract.close()
    loopback = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); "
        "socket.create_connection(s.getsockname()); print('connected')"
    )
    assert await _out(environment, f'{_PYTHON} "{loopback}"') == "connected"


async def test_the_world_is_a_private_writable_copy(start: Start, tmp_path: Path) -> None:
    world = tmp_path / "world"
    (world / "filesystem" / "Finance").mkdir(parents=True)
    (world / "filesystem" / "Finance" / "budget.txt").write_text("100")
    (world / "filesystem" / "Finance" / "budget.txt").chmod(0o400)
    (world / "filesystem" / "link").symlink_to("/etc/shadow")
    (world / "apps_data").mkdir()
    first, second = await start(world_dir=world), await start(world_dir=world)
    assert await _out(first, "cat /filesystem/Finance/budget.txt; ls -d /.apps_data") == "100/.apps_data"
    assert (await first.exec("echo 7 >/filesystem/Finance/budget.txt")).return_code == 0
    assert (await first.exec("cat /filesystem/link")).return_code != 0
    assert await _out(second, "cat /filesystem/Finance/budget.txt") == "100"
    assert (world / "filesystem" / "Finance" / "budget.txt").read_text() == "100"


async def test_out_of_memory_the_kernel_takes_the_sandbox_first(start: Start) -> None:
    environment = await start()
    assert set((await _out(environment, "cat /proc/[0-9]*/oom_score_adj")).split()) == {"800"}


async def test_a_fork_bomb_stays_in_its_sandbox(start: Start) -> None:
    environment, other = await start(), await start()
    done = await environment.exec("for i in $(seq 3000); do sleep 100 & done 2>/dev/null; wait", timeout_sec=3)
    assert done.return_code in (124, 254)  # bash gives up when it cannot fork
    assert (await other.exec("echo fine")).stdout == "fine\n"
    assert threading.active_count() < 50
