"""Child processes: bounded output, timeouts, and nothing left after a cancellation."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from deskrl.sandbox.processes import CLEAN_ENV, finish, run_bounded, run_host


async def test_status_output_and_errors_are_returned() -> None:
    done = await run_bounded(["/bin/bash", "-c", "echo out; echo err >&2; exit 7"])
    assert (done.returncode, done.stdout, done.stderr, done.timed_out) == (7, b"out\n", b"err\n", False)


async def test_the_harness_environment_does_not_reach_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_API_KEY", "hunter2")
    done = await run_bounded(["/usr/bin/env"])
    assert dict(line.split("=", 1) for line in done.stdout.decode().splitlines()) == CLEAN_ENV


async def test_output_past_the_limit_is_dropped_and_counted() -> None:
    done = await run_bounded(["/bin/bash", "-c", "head -c 5000000 /dev/zero | tr '\\0' x"], limit=1000)
    assert done.stdout.startswith(b"x" * 1000 + b"\n[deskrl: output cut, 4999000 more bytes")
    assert done.returncode == 0


async def test_a_timeout_kills_the_whole_group(tmp_path: Path) -> None:
    script = f"sleep 1000 & echo $! >{tmp_path}/pid; wait"
    done = await run_bounded(["/bin/bash", "-c", script], timeout=1)
    assert done.timed_out and done.returncode == 124
    assert not os.path.exists(f"/proc/{int((tmp_path / 'pid').read_text())}/exe")


async def test_a_cancelled_command_is_dead(tmp_path: Path) -> None:
    task = asyncio.create_task(run_bounded(["/bin/bash", "-c", f"echo $$ >{tmp_path}/pid; exec sleep 1000"]))
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not os.path.exists(f"/proc/{int((tmp_path / 'pid').read_text())}")


async def test_a_sink_that_refuses_ends_the_command() -> None:
    def refuse(chunk: bytes) -> None:
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        await run_bounded(["/bin/bash", "-c", "while :; do echo x; done"], stdout_sink=refuse)


async def test_finish_completes_the_work_before_it_passes_a_cancellation_on() -> None:
    entered, steps = asyncio.Event(), []

    async def work() -> None:
        entered.set()
        await asyncio.sleep(0.05)
        steps.append("done")

    task = asyncio.create_task(finish(work()))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == ["done"]


async def test_a_failing_host_tool_says_why() -> None:
    with pytest.raises(OSError, match=r"cp failed with status 1: .*No such file"):
        await run_host(["cp", "/does/not/exist", "/tmp/never"])
