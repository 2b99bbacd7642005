"""Archives from inside are hostile: nothing of them may land outside the target or become a link."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from deskrl.sandbox.errors import SandboxError
from deskrl.sandbox.transfer import SizeGate, merge, pack, unpack


def _archive(*members: tuple[str, bytes, str | None]) -> io.BytesIO:
    """A tar of (name, content, link target); a target makes it a symbolic link."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, content, link in members:
            member = tarfile.TarInfo(name)
            if link is not None:
                member.type, member.linkname = tarfile.SYMTYPE, link
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return stream


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


@pytest.mark.parametrize("name", ["../escaped", "a/../../escaped"])
def test_a_path_out_of_the_target_is_refused(target: Path, name: str) -> None:
    with pytest.raises(SandboxError, match="broken archive"):
        unpack(_archive((name, b"x", None)), target, 1000)
    assert not (target.parent / "escaped").exists()


def test_an_absolute_path_lands_in_the_target(target: Path) -> None:
    unpack(_archive(("/etc/deskrl-never", b"x", None)), target, 1000)
    assert (target / "etc/deskrl-never").read_bytes() == b"x"
    assert not Path("/etc/deskrl-never").exists()


def test_links_are_left_out_and_never_written_through(target: Path) -> None:
    outside = target.parent / "outside"
    outside.mkdir()
    unpack(_archive(("link", b"", str(outside)), ("link/file", b"x", None), ("plain", b"y", None)), target, 1000)
    assert list(outside.iterdir()) == []
    assert not any(path.is_symlink() for path in target.rglob("*"))
    assert (target / "plain").read_bytes() == b"y"


def test_special_files_and_set_user_id_bits_do_not_come_out(target: Path) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        fifo = tarfile.TarInfo("fifo")
        fifo.type = tarfile.FIFOTYPE
        tar.addfile(fifo)
        program = tarfile.TarInfo("program")
        program.mode = 0o6777
        tar.addfile(program)
    unpack(stream, target, 1000)
    assert [path.name for path in target.iterdir()] == ["program"]
    assert (target / "program").stat().st_mode & 0o7022 == 0


def test_more_bytes_than_allowed_are_refused(target: Path) -> None:
    with pytest.raises(SandboxError, match="exceeds 10 bytes"):
        unpack(_archive(("big", b"x" * 11, None)), target, 10)
    gate = SizeGate(io.BytesIO(), 10, "/logs")
    gate(b"x" * 10)
    with pytest.raises(SandboxError, match="/logs in the sandbox is larger than 10 bytes"):
        gate(b"x")


def test_a_cut_archive_is_refused(target: Path) -> None:
    whole = _archive(("file", b"x" * 5000, None)).getvalue()
    with pytest.raises(SandboxError, match="broken archive"):
        unpack(io.BytesIO(whole[:2000]), target, 10_000)


def test_merge_never_follows_a_link_on_the_host(tmp_path: Path, target: Path) -> None:
    source, outside = tmp_path / "source", tmp_path / "outside"
    (source / "folder").mkdir(parents=True)
    (source / "folder/file").write_text("new")
    (source / "name").write_text("new")
    outside.mkdir()
    (outside / "name").write_text("old")
    (target / "folder").symlink_to(outside)
    (target / "name").symlink_to(outside / "name")
    written = merge(source, target, keep=lambda path: False)
    assert written == [target / "name"]
    assert (outside / "name").read_text() == "old" and not (outside / "file").exists()
    assert (target / "name").read_text() == "new" and not (target / "name").is_symlink()


def test_merge_leaves_kept_files_and_folders_in_the_way(tmp_path: Path, target: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("kept", "folder", "free"):
        (source / name).write_text("new")
    (target / "kept").write_text("old")
    (target / "folder").mkdir()
    merge(source, target, keep=lambda path: path.name == "kept")
    assert (target / "kept").read_text() == "old" and (target / "folder").is_dir()
    assert (target / "free").read_text() == "new"


def test_pack_tells_nothing_of_the_host_user(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pack(tmp_path, ".") as archive, tarfile.open(fileobj=archive) as tar:
        assert {(member.uid, member.gid, member.uname, member.gname) for member in tar} == {(0, 0, "", "")}
    assert os.getuid() == (tmp_path / "file").stat().st_uid
