"""The `word` server: text of Word documents.

Invariant: paragraphs and tables come in document order; a page index is a block of 50 of them, since
a .docx holds no page breaks that a reader could count.
"""

from __future__ import annotations

from typing import Annotated
from zipfile import BadZipFile

from deskrl.worlds.roots import WorldRoots
from deskrl.worlds.toolkit import ToolError

_BLOCKS_PER_PAGE = 50


class WordServer:
    """Tools over .docx documents."""

    TOOLS = ("read_document_content",)

    def __init__(self, roots: WorldRoots) -> None:
        self._root = roots.filesystem

    def read_document_content(
        self,
        file_path: Annotated[str, "Path of a .docx file"],
        page_index: Annotated[int | None, "Block of 50 paragraphs from 0; everything when left out"] = None,
    ) -> str:
        """Read the text of a Word document: paragraphs and tables in order."""
        path = self._root.file(file_path)
        import docx
        from docx.opc.exceptions import PackageNotFoundError
        from docx.table import Table

        try:
            document = docx.Document(str(path))
        except (PackageNotFoundError, BadZipFile, KeyError, ValueError) as error:
            raise ToolError(f"{file_path!r} is not a readable .docx: {error}") from error
        blocks: list[str] = []
        for block in document.iter_inner_content():
            if isinstance(block, Table):
                blocks.extend(" | ".join(cell.text for cell in row.cells) for row in block.rows)
            elif block.text.strip():
                heading = block.style is not None and (block.style.name or "").startswith("Heading")
                blocks.append(f"# {block.text}" if heading else block.text)
        if page_index is None:
            return "\n".join(blocks) or "(empty document)"
        pages = max(1, -(-len(blocks) // _BLOCKS_PER_PAGE))
        if not 0 <= page_index < pages:
            raise ToolError(f"page_index must be between 0 and {pages - 1}")
        first = page_index * _BLOCKS_PER_PAGE
        return "\n".join(blocks[first : first + _BLOCKS_PER_PAGE]) or "(empty document)"
