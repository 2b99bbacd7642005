"""Rooted paths: what a tool calls `/` is one directory of the world, and nothing outside it.

Model: a `Root` wraps a real directory. `locate` turns a tool path (`/Finance/budget.xlsx`, or the same
without the slash) into a real path; `shown` turns it back.

Invariant: `locate` never returns a path outside the root, neither through `..` nor through a symlink.
The check is on the resolved path. A world runs in its own sandbox, so a process that swaps a directory
for a link between check and use gains nothing it could not reach itself.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from deskrl.worlds.toolkit import ToolError


@dataclass(frozen=True)
class Root:
    """A directory that tools see as `/`. `path` must be absolute and resolved: use `Root.at`."""

    path: Path

    @classmethod
    def at(cls, path: Path) -> Root:
        """Return the root at `path`, with its symlinks resolved."""
        return cls(path.resolve())

    def locate(self, tool_path: str) -> Path:
        """Return the real path for `tool_path`, which need not exist.

        Raises `ToolError` when the path leaves the root.
        """
        if "\0" in tool_path:
            raise ToolError("the path contains a NUL character")
        candidate = self.path / tool_path.strip().lstrip("/")
        try:
            resolved = candidate.resolve()
        except (OSError, RuntimeError) as error:
            raise ToolError(f"cannot resolve {tool_path!r}: {error}") from error
        if not resolved.is_relative_to(self.path):
            raise ToolError(
                f"path {tool_path!r} escapes the file system of this world; paths start at '/' "
                "and may not lead outside it"
            )
        return resolved

    def file(self, tool_path: str) -> Path:
        """Return the real path of an existing regular file. Raises `ToolError` with a hint otherwise."""
        path = self.locate(tool_path)
        if path.is_dir():
            raise ToolError(f"{tool_path!r} is a directory, not a file; list it with filesystem_list_files")
        # A FIFO or device would block the server for ever: only regular files are opened.
        if not path.exists() or not stat.S_ISREG(path.stat().st_mode):
            raise ToolError(f"no such file: {tool_path!r}{self._hint(tool_path)}")
        return path

    def directory(self, tool_path: str) -> Path:
        """Return the real path of an existing directory. Raises `ToolError` with a hint otherwise."""
        path = self.locate(tool_path)
        if not path.exists():
            raise ToolError(f"no such directory: {tool_path!r}{self._hint(tool_path)}")
        if not path.is_dir():
            raise ToolError(f"{tool_path!r} is a file, not a directory")
        return path

    def new_file(self, tool_path: str, suffix: str) -> Path:
        """Return the real path for a file to create, its parent directory made if needed."""
        path = self.locate(tool_path)
        if path.suffix.lower() != suffix:
            raise ToolError(f"{tool_path!r} must end in {suffix}")
        if path.exists():
            raise ToolError(f"{tool_path!r} already exists; edit it, or choose another name")
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def shown(self, path: Path) -> str:
        """Return the path as tools state it, beginning with `/`."""
        relative = PurePosixPath(os.path.relpath(path, self.path))
        return "/" if str(relative) == "." else f"/{relative}"

    def _hint(self, tool_path: str) -> str:
        # Code execution sees /filesystem, the apps see /: models mix the two up.
        parts = PurePosixPath("/" + tool_path.strip().lstrip("/")).parts
        if len(parts) > 1 and parts[1] == "filesystem":
            return "; tool paths start at '/', without the /filesystem prefix"
        return "; use filesystem_search_files or filesystem_get_directory_tree to find it"


@dataclass(frozen=True)
class WorldRoots:
    """The two directories of a world: documents (`/filesystem`) and app state (`/.apps_data`)."""

    filesystem: Root
    apps_data: Root


def share(path: Path) -> None:
    """Make a written file readable and writable by every service user of the world."""
    os.chmod(path, stat.S_IMODE(path.stat().st_mode) | 0o666)
