"""The in-process tool servers of a world, by name.

Invariant: importing this package imports no document library; each server module is imported when a
world mounts it, and each library when a call needs it.
"""

from __future__ import annotations

from importlib import import_module

from deskrl.worlds.roots import WorldRoots
from deskrl.worlds.toolkit import Tool, tool_from

SERVERS: dict[str, str] = {
    "excel": "ExcelServer",
    "filesystem": "FilesystemServer",
    "mail": "MailServer",
    "pdfs": "PdfServer",
    "word": "WordServer",
}


def mount(name: str, roots: WorldRoots) -> list[Tool]:
    """Return the tools of server `name` over a world's directories. Raises `KeyError` if unknown."""
    module = import_module(f"{__name__}.{name}") if name in SERVERS else None
    if module is None:
        raise KeyError(name)
    server = getattr(module, SERVERS[name])(roots)
    return [tool_from(name, getattr(server, tool)) for tool in server.TOOLS]
