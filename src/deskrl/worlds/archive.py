"""Moving a world's state in and out as tar.gz: the `/data/populate` and `/data/snapshot` of the contract.

Model: the state is two trees, `filesystem` and `.apps_data` (the subsystems). A snapshot holds both,
with the subsystem as the first path component; an archive to populate holds one, relative to its root.

Invariants
- A snapshot depends on names, contents and modes only: sorted entries, no owners, modification times
  kept to whole seconds, gzip header without a time.
- Only regular files and directories travel. Links and special files are left out, so that no reader of
  a snapshot can be led outside it, and a FIFO cannot block the server.
- Populating refuses entries that leave the subsystem and archives that unpack to more than the limit.
"""

from __future__ import annotations

import gzip
import os
import stat
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from deskrl.worlds.roots import WorldRoots

SUBSYSTEMS = ("filesystem", ".apps_data")
MAX_EXTRACTED_BYTES = 4 * 1024**3


class ArchiveError(Exception):
    """An archive or subsystem name that cannot be accepted; the text names the rule."""


@dataclass(frozen=True)
class Populated:
    """What `populate` added: files and directories, and the bytes of the files."""

    objects_added: int
    subsystem: str
    extracted_bytes: int


def subsystem_path(roots: WorldRoots, subsystem: str) -> Path:
    """Return the real directory of a subsystem. Raises `ArchiveError` for an unknown name."""
    if subsystem not in SUBSYSTEMS:
        raise ArchiveError(f"unknown subsystem {subsystem!r}; use one of {', '.join(SUBSYSTEMS)}")
    return roots.filesystem.path if subsystem == "filesystem" else roots.apps_data.path


def populate(roots: WorldRoots, subsystem: str, archive: IO[bytes]) -> Populated:
    """Unpack a tar.gz into a subsystem, over what is there. Raises `ArchiveError`.

    The archive is checked in full before the first file is written.
    """
    target = subsystem_path(roots, subsystem)
    try:
        with tarfile.open(fileobj=archive, mode="r:gz") as tar:
            members = [m for m in tar.getmembers() if m.name.strip("./")]
            for member in members:
                if not (member.isfile() or member.isdir()):
                    raise ArchiveError(f"entry {member.name!r} is neither a file nor a directory")
                tarfile.data_filter(member, str(target))
            size = sum(member.size for member in members)
            if size > MAX_EXTRACTED_BYTES:
                raise ArchiveError(f"the archive unpacks to {size} bytes, more than {MAX_EXTRACTED_BYTES}")
            target.mkdir(parents=True, exist_ok=True)
            tar.extractall(target, members=members, filter="data")
    except (tarfile.TarError, EOFError, gzip.BadGzipFile) as error:
        raise ArchiveError(f"not an acceptable tar.gz: {error}") from error
    for member in members:
        path = target / member.name
        os.chmod(path, stat.S_IMODE(path.stat().st_mode) | (0o777 if member.isdir() else 0o666))
    return Populated(len(members), subsystem, size)


def snapshot(roots: WorldRoots, output: IO[bytes]) -> int:
    """Write both subsystems as tar.gz to `output`; return the number of files."""
    files = 0
    with (
        # Level 1: a snapshot is taken in every trial that needs one, and office files are compressed already.
        gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=output, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for subsystem in SUBSYSTEMS:
            root = subsystem_path(roots, subsystem)
            if not root.is_dir():
                continue
            tar.addfile(_directory(subsystem, root))
            for folder, folders, names in os.walk(root):
                folders[:] = sorted(n for n in folders if not os.path.islink(os.path.join(folder, n)))
                for name in folders:
                    path = Path(folder, name)
                    tar.addfile(_directory(f"{subsystem}/{path.relative_to(root)}", path))
                for name in sorted(names):
                    path = Path(folder, name)
                    files += _add_file(tar, f"{subsystem}/{path.relative_to(root)}", path)
    return files


def _add_file(tar: tarfile.TarFile, name: str, path: Path) -> int:
    # O_NOFOLLOW and O_NONBLOCK: what was a file a moment ago may be a link or a FIFO now.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return 0
    with os.fdopen(descriptor, "rb") as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            return 0
        tar.addfile(_info(name, status), stream)
    return 1


def _directory(name: str, path: Path) -> tarfile.TarInfo:
    info = _info(name, path.stat())
    info.type, info.size = tarfile.DIRTYPE, 0
    return info


def _info(name: str, status: os.stat_result) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = status.st_size, stat.S_IMODE(status.st_mode), int(status.st_mtime)
    return info
