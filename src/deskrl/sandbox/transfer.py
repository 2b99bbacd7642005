"""Files in and out of a sandbox, as tar streams. What comes out is hostile.

In: packed on the host, unpacked inside by the sandbox user. Out: packed inside, held to a size on the way,
and unpacked on the host as plain files and folders only, first into a folder of its own; then merged into the
target, where `keep` decides which existing or reserved files stay as they are.
"""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from deskrl.sandbox.errors import SandboxError

_MAX_MEMBERS = 200_000


def pack(source: Path, name: str) -> IO[bytes]:
    """A temporary file, at its start, with a tar of `source` as `name` ('.' for a folder's contents)."""
    archive = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    try:
        with tarfile.open(fileobj=archive, mode="w", format=tarfile.GNU_FORMAT) as tar:
            tar.add(source, arcname=name, filter=_anonymous)
        archive.seek(0)
    except BaseException:
        archive.close()
        raise
    return archive


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


class SizeGate:
    """Writes chunks to a file and refuses more than `limit` bytes in all (SandboxError)."""

    def __init__(self, target: IO[bytes], limit: int, what: str) -> None:
        self._target, self._left, self._limit, self._what = target, limit, limit, what

    def __call__(self, chunk: bytes) -> None:
        self._left -= len(chunk)
        if self._left < 0:
            raise SandboxError(f"{self._what} in the sandbox is larger than {self._limit} bytes: not downloaded")
        self._target.write(chunk)


def unpack(archive: IO[bytes], target: Path, limit: int) -> None:
    """Unpack an untrusted tar into the new folder `target`: plain files and folders, `limit` bytes in all.

    Links and special files are left out. Raises SandboxError for an archive that is broken or too large.
    """
    archive.seek(0)
    left, count = limit, 0
    try:
        with tarfile.open(fileobj=archive, mode="r:") as tar:
            for member in tar:
                count += 1
                left -= max(0, member.size)
                if left < 0 or count > _MAX_MEMBERS:
                    raise SandboxError(f"download exceeds {limit} bytes or {_MAX_MEMBERS} files")
                if member.isreg() or member.isdir():
                    member.mode = 0o755 if member.isdir() else 0o644 | (member.mode or 0) & 0o111
                    tar.extract(member, target, filter="data")
    except (tarfile.TarError, OSError, ValueError) as error:
        raise SandboxError(f"the sandbox sent a broken archive: {error}") from error


def merge(source: Path, target: Path, keep: Callable[[Path], bool]) -> list[Path]:
    """Move every file below `source` to the same place below `target`; returns the files written.

    A file for which `keep(destination)` holds is left out. Existing links and folders in the way of a file
    are never followed: a link is replaced, a folder stays and the file is left out.
    """
    written: list[Path] = []
    for relative, is_dir in _walk(source):
        destination = target / relative
        if is_dir:
            if not destination.is_symlink() and not destination.exists():
                destination.mkdir(parents=True)
            continue
        real_parent = destination.parent.is_dir() and destination.parent.resolve() == (
            target.resolve() / relative.parent
        )
        if keep(destination) or not real_parent or (destination.is_dir() and not destination.is_symlink()):
            continue
        if destination.is_symlink():
            destination.unlink()
        shutil.move(source / relative, destination)
        written.append(destination)
    return written


def _walk(folder: Path) -> Iterator[tuple[Path, bool]]:
    for base, folders, files in os.walk(folder):
        relative = Path(base).relative_to(folder)
        for name in folders:
            yield relative / name, True
        for name in files:
            yield relative / name, False
