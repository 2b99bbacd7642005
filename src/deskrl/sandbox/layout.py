"""The file tree of a sandbox, as bwrap arguments. Pure: reads the host, writes nothing.

Invariant: what the harness runs inside (/usr, /bin, /lib, /etc, the Python folders) cannot be replaced by the
agent, although it owns / and /root there. A path component that is a mount point cannot be renamed or
removed; a plain folder above a mount point can. So every borrowed path is either a mount directly below a
writable folder, or lies in a tmpfs there that is remounted read-only once its mount points exist.

The writable folders are on disk, not tmpfs: they survive `quiesce`, which replaces the namespaces, and do not
eat memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Of /etc only what programs need to run; never shadow, keys or machine configuration.
_ETC = (
    "alternatives",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "ssl/certs",
    "pki/tls/certs",
    "ca-certificates",
    "fonts",
    "mime.types",
    "localtime",
    "libreoffice",
    "magic",
)
_ETC_FILES = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "resolv.conf": "",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


def write_etc(folder: Path) -> None:
    """Write the made-up part of /etc into `folder` (owned by the harness, world-readable)."""
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    for name, text in _ETC_FILES.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o644)


@dataclass
class Layout:
    """Builds bwrap's mount arguments for one sandbox.

    `root` becomes /, `writable` maps further paths inside to host folders, `borrowed` maps paths inside to
    host folders that appear read-only, `etc` is the folder that `write_etc` made.
    """

    root: Path
    etc: Path
    writable: Mapping[str, Path]
    borrowed: Mapping[str, str]
    _args: list[str] = field(default_factory=list)

    def arguments(self) -> list[str]:
        """The mount arguments, in the order in which bwrap has to apply them."""
        self._args = ["--bind", str(self.root), "/", "--ro-bind", "/usr", "/usr"]
        for name in _SYSTEM:
            # Mounts rather than symbolic links: the agent owns / and could replace a link.
            if os.path.isdir(f"/{name}"):
                self._add("--ro-bind", os.path.realpath(f"/{name}"), f"/{name}")
        self._etc()
        self._add("--proc", "/proc")
        self._add("--dev", "/dev")
        self._add("--tmpfs", "/run")
        for inside, host in self.writable.items():
            self._add("--bind", str(host), inside)
        self._add("--remount-ro", "/run")
        self._borrow()
        return self._args

    def _add(self, *words: str) -> None:
        self._args += words

    def _etc(self) -> None:
        self._add("--tmpfs", "/etc")
        for name in _ETC_FILES:
            self._add("--ro-bind", str(self.etc / name), f"/etc/{name}")
        for name in _ETC:
            if os.path.exists(f"/etc/{name}"):
                self._add("--ro-bind", os.path.realpath(f"/etc/{name}"), f"/etc/{name}")
        self._add("--remount-ro", "/etc")

    def _borrow(self) -> None:
        covers: list[str] = []
        for inside in self.borrowed:
            cover = self._cover(inside)
            if cover != inside and cover not in covers:
                covers.append(cover)
                self._add("--tmpfs", cover)
        for inside, host in self.borrowed.items():
            self._add("--ro-bind", host, inside)
        for cover in covers:
            self._add("--remount-ro", cover)

    def _cover(self, inside: str) -> str:
        """The path's first component below the deepest writable folder that holds it."""
        above = max((w for w in ("/", *self.writable) if inside.startswith(w.rstrip("/") + "/")), key=len)
        rest = inside[len(above.rstrip("/")) + 1 :]
        return f"{above.rstrip('/')}/{rest.split('/')[0]}"
