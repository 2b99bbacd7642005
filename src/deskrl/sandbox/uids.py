"""One unprivileged host uid per sandbox, for a harness that runs as root.

Two sandboxes that shared a uid could reach each other's files, and host uid 0 must never be mapped inside
(it may write /proc/sys even without capabilities). A uid is owned by holding flock() on its lock file, so a
dead harness frees its uids by dying. The locks are host-wide, not per scratch folder: uids are.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from deskrl.sandbox.errors import SandboxUnavailable

_LOCK_DIR = Path("/run/deskrl-uids")
# Above systemd's container range and below 2^31, so no distribution hands these out.
_PREFERRED, _COUNT = 1_900_000_000, 30_000
# Inside a container whose user namespace maps only 65536 ids.
_SMALL = 30_000


@dataclass
class UidLease:
    """A host uid (the gid has the same number) owned until `release`."""

    uid: int
    _fd: int

    def release(self) -> None:
        """Give the uid back. Call it only once no process of that uid is left. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _mapped(first: int, count: int) -> bool:
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        inside, _, length = (int(word) for word in line.split())
        if inside <= first and first + count <= inside + length:
            return True
    return False


def uid_range() -> range:
    """The uids to draw from on this host. Raises SandboxUnavailable when none of them is mapped."""
    for first in (_PREFERRED, _SMALL):
        if _mapped(first, _COUNT):
            return range(first, first + _COUNT)
    raise SandboxUnavailable(
        f"no range of {_COUNT} spare user ids is mapped in this container (see /proc/self/uid_map). "
        "Run deskrl as an unprivileged user, or give the container a full uid map."
    )


def lease_uid(lock_dir: Path = _LOCK_DIR) -> UidLease:
    """Own a uid that no other live sandbox on this host has. Raises SandboxUnavailable when all are taken."""
    lock_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    for uid in uid_range():
        fd = os.open(lock_dir / f"{uid}.lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return UidLease(uid, fd)
        os.close(fd)
    raise SandboxUnavailable(f"all {_COUNT} sandbox user ids are in use: stop some runs (locks: {lock_dir})")
