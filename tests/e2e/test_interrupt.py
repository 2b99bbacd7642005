"""Ctrl-C (and worse) at different moments: nothing stays behind, and a second start works."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from processes import Deskrl

pytestmark = pytest.mark.e2e


def start(tmp_path: Path, name: str = "run") -> tuple[Deskrl, Path]:
    folder = tmp_path / name
    return Deskrl(["smoke", "--model", "tiny", "--steps", "1", "--run-dir", str(folder)], tmp_path), folder


def wait_for(deskrl: Deskrl, folder: Path, phase: str, running: int = 0, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert deskrl.process.poll() is None, deskrl.text()
        try:
            progress = json.loads((folder / "progress.json").read_text())
        except (OSError, ValueError):
            progress = {}
        if progress.get("phase") == phase and progress.get("running", 0) >= running:
            return
        time.sleep(0.05)
    raise AssertionError(f"never reached {phase!r}: {deskrl.text()}")


def interrupted(deskrl: Deskrl, how: signal.Signals = signal.SIGINT) -> None:
    deskrl.process.send_signal(how)
    assert deskrl.wait(90) == 130
    assert "Traceback" not in deskrl.text()
    assert deskrl.leftovers() == []


def test_while_importing(tmp_path: Path) -> None:
    deskrl, _ = start(tmp_path)
    time.sleep(4)
    interrupted(deskrl)


def test_while_engine_and_ray_start(tmp_path: Path) -> None:
    deskrl, folder = start(tmp_path)
    wait_for(deskrl, folder, "starting engine and SkyRL")
    time.sleep(8)
    interrupted(deskrl, signal.SIGTERM)


def test_while_trials_run_twice_in_a_row_and_impatiently(tmp_path: Path) -> None:
    for name in ("first", "second"):
        deskrl, folder = start(tmp_path, name)
        wait_for(deskrl, folder, "training", running=2)
        deskrl.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        interrupted(deskrl)


def test_a_killed_command_takes_its_run_along_and_the_next_start_sweeps(tmp_path: Path) -> None:
    deskrl, folder = start(tmp_path)
    wait_for(deskrl, folder, "training", running=2)
    deskrl.process.kill()
    deskrl.process.wait()
    deadline = time.monotonic() + 60
    while deskrl.processes() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert deskrl.processes() == []
