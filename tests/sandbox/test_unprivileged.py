"""The same sandbox for a harness without root: in its own process, as a user that owns nothing here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deskrl.sandbox.runtime import python_folders

_USER = 65533
_PROBE = """
import asyncio, json, os, sys
from pathlib import Path
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths
from deskrl.sandbox.bubblewrap import BubblewrapEnvironment
from deskrl.sandbox.sweep import sandbox_processes

async def main():
    home = Path(sys.argv[1])
    (home / "environment").mkdir()
    (home / "secret").write_text("x")
    world = home / "world" / "filesystem"
    world.mkdir(parents=True)
    (world / "file.txt").write_text("world")
    paths = TrialPaths(trial_dir=home / "trial")
    paths.mkdir()
    box = BubblewrapEnvironment(
        environment_dir=home / "environment", environment_name="t", session_id="t", trial_paths=paths,
        task_env_config=EnvironmentConfig(), scratch_dir=home / "s", world_dir=home / "world",
    )
    said = {"uid": os.geteuid()}
    async def out(name, command, **kwargs):
        done = await box.exec(command, **kwargs)
        said[name] = [done.return_code, (done.stdout or "").strip()]
    await box.start()
    folder = box._require_folder()
    await out("identity", "id -u; cat /filesystem/file.txt")
    await out("capabilities", "cat /proc/[0-9]*/status | grep ^Cap | tr -d '\\\\t' | cut -d: -f2 | sort -u")
    await out("variables", "cat /proc/[0-9]*/environ | tr '\\\\0' '\\\\n' | grep -c 'hunter[2]'")
    await out("host", f"cat {home}/secret /etc/shadow; ls /proc | grep -c '^[0-9]'")
    await out("network", "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '")
    await out("sysctl", "echo 1 >/proc/sys/kernel/panic")
    await out("nested", "unshare --user --map-root-user true")
    await out("python", '"$DESKRL_PYTHON" -c "import deskrl; print(7)"')
    await out("timeout", "setsid --fork sleep 8888; sleep 8888", timeout_sec=1)
    await out("after", "cat /proc/[0-9]*/cmdline | tr '\\\\0' ' ' | grep -c '8[8]88'")
    await box.spawn("while :; do echo 42 >/logs/verifier/reward.txt; sleep 0.01; done", "/tmp/log")
    await box.exec("mkdir -p /app/locked/deep && chmod 0 /app/locked /tmp /logs/verifier")
    await box.quiesce()
    await out("quiesced", "ls -A /logs/verifier; cat /proc/[0-9]*/cmdline | tr '\\\\0' ' ' | grep -c 'reward[.]txt'")
    await box.upload_file(world / "file.txt", "/in/copy")
    await box.download_file("/in/copy", home / "back")
    said["transfer"] = (home / "back").read_text()
    await box.stop()
    said["left"] = [sandbox_processes(folder), [path.name for path in (home / "s").iterdir()]]
    print(json.dumps(said))

asyncio.run(main())
"""
# Makes the Python folders reachable although they may lie below folders that the user cannot enter: what is
# needed is bound aside, the closed folder covered, and what is needed bound again at its old path.
_EXPOSE = """
set -e
hold=$1; shift
number=0
for folder in $FOLDERS; do mkdir -p "$hold/$number"; mount --bind "$folder" "$hold/$number"; : $((number += 1)); done
for cover in $COVERS; do mount -t tmpfs -o mode=755 none "$cover"; done
number=0
for folder in $FOLDERS; do mkdir -p "$folder"; mount --bind "$hold/$number" "$folder"; : $((number += 1)); done
exec "$@"
"""


def _closed_above(path: Path) -> Path | None:
    """The topmost folder above `path` that others cannot enter."""
    return next((parent for parent in reversed(path.parents) if not parent.stat().st_mode & 0o001), None)


@pytest.fixture
def home() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="dsu", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def _run_probe(home: Path) -> dict[str, Any]:
    probe = [sys.executable, "-c", _PROBE, str(home / "u")]
    env = {"PATH": os.environ["PATH"], "HOME": str(home / "u"), "SECRET_API_KEY": "hunter2"}
    home.chmod(0o711)
    (home / "u").mkdir()
    if os.geteuid() == 0:
        os.chown(home / "u", _USER, _USER)
        hidden = {Path(path): _closed_above(Path(path)) for path in python_folders().values()}
        env["FOLDERS"] = " ".join(str(path) for path, cover in hidden.items() if cover)
        env["COVERS"] = " ".join({str(cover) for cover in hidden.values() if cover})
        (home / "hold").mkdir(mode=0o755)
        expose = ["unshare", "--mount", "--propagation", "private", "--", "/bin/sh", "-c", _EXPOSE, "expose"]
        check = [*expose, str(home / "hold"), "setpriv", f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups"]
        works = subprocess.run([*check, sys.executable, "-c", "import deskrl"], env=env, capture_output=True, text=True)
        if works.returncode:
            pytest.skip(f"uid {_USER} cannot run this Python environment: {works.stderr[-300:]}")
        probe = [*check, *probe]
    done = subprocess.run(probe, env=env, cwd="/", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_an_unprivileged_harness_gets_the_same_sandbox(home: Path) -> None:
    said = _run_probe(home)
    assert said.pop("uid") != 0
    refused = {name: said.pop(name)[0] for name in ("sysctl", "nested")}
    assert 0 not in refused.values(), refused
    code, host = said.pop("host")
    assert code == 0 and int(host) < 8, "only the sandbox's own processes are seen, and no text of a secret"
    assert said == {
        "identity": [0, "0\nworld"],
        "capabilities": [0, "0000000000000000"],
        "variables": [1, "0"],
        "network": [0, "lo"],
        "python": [0, "7"],
        "timeout": [124, ""],
        "after": [1, "0"],
        "quiesced": [1, "0"],
        "transfer": "world",
        "left": [[], []],
    }
