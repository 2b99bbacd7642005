"""Commands, background servers, the world's socket, and files in and out of a real sandbox."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import httpx
import pytest
from sandbox_helpers import Start, make_environment

from deskrl.sandbox.bubblewrap import BubblewrapEnvironment
from deskrl.sandbox.errors import SandboxError

_SERVER = """
import http.server, os, socketserver
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(self.path.encode())
    def address_string(self): return "unix"
class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer): pass
Server(os.environ["DESKRL_WORLD_SOCKET"], Handler).serve_forever()
"""


async def _out(environment: BubblewrapEnvironment, command: str) -> str:
    return ((await environment.exec(command)).stdout or "").strip()


async def test_status_streams_folder_and_variables(start: Start) -> None:
    environment = await start()
    done = await environment.exec("pwd; echo $A; echo no >&2; exit 3", cwd="/tmp", env={"A": "b c"})
    assert (done.return_code, done.stdout, done.stderr) == (3, "/tmp\nb c\n", "no\n")
    assert await _out(environment, "pwd") == "/app"
    assert (await environment.exec("true", cwd="/nowhere")).return_code != 0


async def test_a_timeout_kills_detached_children_too(start: Start) -> None:
    environment = await start()
    done = await environment.exec(
        "setsid --fork sleep 31337; (setsid nohup sleep 31337 &) ; echo begun; sleep 31337", timeout_sec=1
    )
    assert done.return_code == 124 and done.stdout == "begun\n"
    assert "killed after 1 s" in (done.stderr or "")
    assert "31337" not in await _out(environment, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")


async def test_a_cancelled_command_is_dead_and_the_sandbox_goes_on(start: Start) -> None:
    environment = await start()
    task = asyncio.create_task(environment.exec("setsid --fork sleep 31338; echo x >/tmp/begun; sleep 31338"))
    while await _out(environment, "cat /tmp/begun 2>/dev/null") != "x":
        await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "31338" not in await _out(environment, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")


async def test_a_background_child_does_not_hold_a_command_up(start: Start) -> None:
    environment = await start()
    done = await asyncio.wait_for(environment.exec("sleep 31339 & echo done"), 30)
    assert done.return_code == 0 and done.stdout == "done\n"


async def test_other_users_and_unknown_keywords_are_refused(start: Start, tmp_path: Path, scratch: Path) -> None:
    environment = await start()
    with pytest.raises(ValueError, match="user 'agent' does not exist in a bubblewrap sandbox"):
        await environment.exec("true", user="agent")
    with pytest.raises(TypeError, match=r"unknown environment keyword 'word_dir'.*did you mean 'world_dir'"):
        make_environment(tmp_path / "typo", scratch, word_dir="/tmp")
    with pytest.raises(ValueError, match="holds none of the folders"):
        make_environment(tmp_path / "empty", scratch, world_dir=tmp_path)


async def test_a_spawned_server_answers_on_the_world_socket_until_quiesce(start: Start) -> None:
    environment = await start()
    await environment.spawn(f"exec $DESKRL_PYTHON -c '{_SERVER}'", "/tmp/logs/server.log")
    async with environment.world_endpoint.http_client(timeout=5) as client:
        for _ in range(500):
            try:
                response = await client.get("/hello")
                break
            except httpx.ConnectError:
                await asyncio.sleep(0.02)
        assert response.text == "/hello"
        answers = await asyncio.gather(*(client.get(f"/{number}") for number in range(20)))
        assert [answer.text for answer in answers] == [f"/{number}" for number in range(20)]
    await environment.quiesce()
    async with environment.world_endpoint.http_client(timeout=5) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get("/hello")


async def test_a_link_in_place_of_the_world_socket_is_not_followed(start: Start, tmp_path: Path) -> None:
    environment = await start()
    victim = socket.socket(socket.AF_UNIX)
    victim.bind(str(tmp_path / "docker.sock"))
    victim.listen()
    await environment.exec(f"ln -s {tmp_path}/docker.sock $DESKRL_WORLD_SOCKET")
    assert os.path.exists(environment.world_endpoint.uds or "")
    async with environment.world_endpoint.http_client(timeout=5) as client:
        with pytest.raises(httpx.ConnectError, match="refusing to follow it"):
            await client.get("/")
    victim.close()


async def test_a_server_that_cannot_start_leaves_its_reason_in_the_log(start: Start) -> None:
    environment = await start()
    await environment.spawn("echo starting; exec no-such-program", "/tmp/server.log")
    while "no-such-program" not in (text := await _out(environment, "cat /tmp/server.log")):
        await asyncio.sleep(0.02)
    assert text.startswith("starting")
    with pytest.raises(SandboxError, match="could not start"):
        await environment.spawn("true", "/etc/forbidden/log")


async def test_files_and_folders_go_in_and_come_out(start: Start, tmp_path: Path) -> None:
    environment = await start()
    source = tmp_path / "in"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "naïve name.txt").write_bytes(os.urandom(300_000))
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o755)
    await environment.upload_dir(source, "/work space/in")
    await environment.upload_file(source / "run.sh", "/opt/x/other.sh")
    assert await _out(environment, "'/work space/in/run.sh' && /opt/x/other.sh") == "ran\nran"
    assert await _out(environment, "stat -c %U /opt/x/other.sh") == "root"
    await environment.download_dir("/work space/in", tmp_path / "out")
    name = "deep/naïve name.txt"
    assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    await environment.download_file("/opt/x/other.sh", tmp_path / "new" / "copy.sh")
    assert (tmp_path / "new" / "copy.sh").read_text() == (source / "run.sh").read_text()
    await environment.download_dir_filtered(source_dir="/work space/in", target_dir=tmp_path / "some", include=["*.sh"])
    assert [path.name for path in (tmp_path / "some").rglob("*") if path.is_file()] == ["run.sh"]
    for missing in ("/nothing", "/dev/null", "/work space"):
        with pytest.raises(SandboxError):
            await environment.download_file(missing, tmp_path / "never")
    assert not (tmp_path / "never").exists()


async def test_tricks_in_a_download_reach_nothing_else(start: Start, tmp_path: Path) -> None:
    environment = await start()
    agent_dir = environment.trial_paths.agent_dir
    agent_dir.mkdir(parents=True, exist_ok=True)
    (agent_dir / "trajectory.json").write_text("honest")
    (agent_dir / "tokens.bin").write_text("honest")
    outside = tmp_path / "outside"
    outside.write_text("honest")
    await environment.exec(
        f"cd /logs/agent && ln -s {outside} link && ln -s / slash && ln -s {agent_dir}/trajectory.json t && "
        "mkfifo f && echo evil >trajectory.json && echo evil >tokens.bin && mkdir -p deep && "
        "echo ok >deep/notes.txt && mkdir -p sub && ln -s ../../.. sub/up && ln /logs/agent/deep/notes.txt hard"
    )
    await environment.download_dir("/logs/agent", agent_dir)
    # Of a file with two names, tar sends the second as a link, which may be missing outside.
    come_out = {path.relative_to(agent_dir).as_posix() for path in agent_dir.rglob("*") if path.is_file()}
    assert come_out - {"hard", "deep/notes.txt"} == {"trajectory.json", "tokens.bin"}
    assert come_out & {"hard", "deep/notes.txt"}
    assert (agent_dir / "trajectory.json").read_text() == (agent_dir / "tokens.bin").read_text() == "honest"
    assert not any(path.is_symlink() for path in agent_dir.rglob("*")) and outside.read_text() == "honest"
    # What came from inside before may be refreshed from inside.
    await environment.exec("cd /logs/agent && rm -f hard && echo more >deep/notes.txt")
    await environment.download_dir("/logs/agent", agent_dir)
    assert (agent_dir / "deep" / "notes.txt").read_text() == "more\n"
    await environment.exec("rm -rf /logs/agent && ln -s /proc/1/root/etc /logs/agent")
    await environment.download_dir("/logs/agent", tmp_path / "etc")
    assert not (tmp_path / "etc" / "shadow").exists()


async def test_a_download_over_the_trial_needs_no_reserved_file_to_exist(start: Start) -> None:
    environment = await start()
    await environment.exec("echo evil >/logs/agent/trajectory.json")
    await environment.download_dir("/logs/agent", environment.trial_paths.agent_dir)
    assert not (environment.trial_paths.agent_dir / "trajectory.json").exists()
    open_one = await start(trusted_agent_files=[])
    await open_one.exec("echo mine >/logs/agent/trajectory.json")
    await open_one.download_dir("/logs/agent", open_one.trial_paths.agent_dir)
    assert (open_one.trial_paths.agent_dir / "trajectory.json").read_text() == "mine\n"
