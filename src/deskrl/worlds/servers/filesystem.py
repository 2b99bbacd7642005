"""The `filesystem` server: read-only listing, search and reading of plain text.

Invariants: nothing is written; every listing is sorted, so that a result depends on the files only;
symlinks are listed but never followed while walking.
"""

from __future__ import annotations

import fnmatch
import json
import mimetypes
import os
import struct
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from deskrl.worlds.roots import WorldRoots
from deskrl.worlds.toolkit import ToolError

_OTHER_READERS = {
    ".pdf": "pdfs_read_pdf_pages",
    ".docx": "word_read_document_content",
    ".xlsx": "excel_read_tab",
    ".pptx": "powerpoint_read_completedeck",
    ".png": "filesystem_read_image_file",
    ".jpg": "filesystem_read_image_file",
    ".jpeg": "filesystem_read_image_file",
    ".gif": "filesystem_read_image_file",
}
_MAX_TEXT_BYTES = 5_000_000


class FilesystemServer:
    """Tools over the world's documents."""

    TOOLS = (
        "list_files",
        "get_directory_tree",
        "search_files",
        "read_text_file",
        "read_image_file",
        "get_file_metadata",
    )

    def __init__(self, roots: WorldRoots) -> None:
        self._root = roots.filesystem

    def list_files(self, path: Annotated[str, "Directory to list"] = "/") -> str:
        """List the files and folders directly inside a directory."""
        directory = self._root.directory(path)
        lines = []
        for entry in sorted(os.scandir(directory), key=lambda e: e.name):
            if entry.is_dir(follow_symlinks=False):
                lines.append(f"[DIR]  {entry.name}/")
            else:
                size = entry.stat(follow_symlinks=False).st_size
                lines.append(f"[FILE] {entry.name} ({size} bytes)")
        return "\n".join(lines) or "(empty directory)"

    def get_directory_tree(
        self,
        path: Annotated[str, "Directory to start from"] = "/",
        max_depth: Annotated[int, "Levels to descend, 1 to 20"] = 5,
        include_files: Annotated[bool, "Show files as well as folders"] = True,
        show_size: Annotated[bool, "Show file sizes in bytes"] = False,
    ) -> str:
        """Show a directory and everything below it as an indented tree."""
        if not 1 <= max_depth <= 20:
            raise ToolError("max_depth must be between 1 and 20")
        start = self._root.directory(path)
        lines = [self._root.shown(start)]

        def walk(directory: Path, depth: int) -> None:
            for entry in sorted(os.scandir(directory), key=lambda e: e.name):
                indent = "  " * depth
                if entry.is_dir(follow_symlinks=False):
                    lines.append(f"{indent}{entry.name}/")
                    if depth < max_depth:
                        walk(Path(entry.path), depth + 1)
                elif include_files:
                    size = f" ({entry.stat(follow_symlinks=False).st_size} bytes)" if show_size else ""
                    lines.append(f"{indent}{entry.name}{size}")

        walk(start, 1)
        return "\n".join(lines)

    def search_files(
        self,
        pattern: Annotated[str, "File name or glob such as *.xlsx; a plain word matches any part of a name"],
        path: Annotated[str, "Directory to search in"] = "/",
        recursive: Annotated[bool, "Search sub-folders too"] = True,
        max_results: Annotated[int, "Most paths to return"] = 100,
    ) -> str:
        """Find files by name (case-insensitive)."""
        if max_results < 1:
            raise ToolError("max_results must be at least 1")
        glob = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
        found = [
            shown
            for shown, name in self._files(self._root.directory(path), recursive)
            if fnmatch.fnmatchcase(name.lower(), glob.lower()) or fnmatch.fnmatchcase(shown.lower(), glob.lower())
        ]
        if not found:
            return f"no file matches {pattern!r} under {path}"
        more = f"\n... and {len(found) - max_results} more" if len(found) > max_results else ""
        return "\n".join(found[:max_results]) + more

    def read_text_file(
        self,
        file_path: Annotated[str, "Path of a text file (txt, md, csv, json, ...)"],
        encoding: Annotated[str, "Text encoding"] = "utf-8",
    ) -> str:
        """Read a plain-text file. PDF, Word and Excel files have their own tools."""
        path = self._root.file(file_path)
        reader = _OTHER_READERS.get(path.suffix.lower())
        if reader:
            raise ToolError(f"{file_path!r} is not plain text; read it with {reader}")
        if path.stat().st_size > _MAX_TEXT_BYTES:
            raise ToolError(f"{file_path!r} is larger than {_MAX_TEXT_BYTES} bytes")
        try:
            return path.read_bytes().decode(encoding)
        except LookupError:
            raise ToolError(f"unknown encoding {encoding!r}; try utf-8 or latin-1") from None
        except UnicodeDecodeError as error:
            raise ToolError(f"{file_path!r} is not {encoding} text ({error.reason}); try latin-1") from None

    def read_image_file(self, file_path: Annotated[str, "Path of an image"]) -> str:
        """Describe an image: format, size in pixels and bytes. The pixels themselves are not returned."""
        path = self._root.file(file_path)
        data = path.read_bytes()[:32]
        image: dict[str, object] = {"path": self._root.shown(path), "bytes": path.stat().st_size}
        if data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) >= 24:
            width, height = struct.unpack(">II", data[16:24])
            image |= {"format": "png", "width": width, "height": height}
        elif data[:6] in (b"GIF87a", b"GIF89a"):
            width, height = struct.unpack("<HH", data[6:10])
            image |= {"format": "gif", "width": width, "height": height}
        elif data.startswith(b"\xff\xd8"):
            image |= {"format": "jpeg"}
        else:
            raise ToolError(f"{file_path!r} is not a PNG, GIF or JPEG image")
        return json.dumps(image)

    def get_file_metadata(self, file_path: Annotated[str, "Path of a file or folder"]) -> str:
        """Return size, type and modification time of a file or folder."""
        path = self._root.locate(file_path)
        if not path.exists():
            self._root.file(file_path)
        status = path.stat()
        return json.dumps(
            {
                "path": self._root.shown(path),
                "type": "directory" if path.is_dir() else "file",
                "size_bytes": status.st_size,
                "mime_type": mimetypes.guess_type(path.name)[0],
                "modified": datetime.fromtimestamp(int(status.st_mtime), UTC).isoformat(),
            }
        )

    def _files(self, directory: Path, recursive: bool) -> Iterator[tuple[str, str]]:
        for folder, folders, names in os.walk(directory):
            folders.sort()
            for name in sorted(names):
                yield self._root.shown(Path(folder) / name), name
            if not recursive:
                return
