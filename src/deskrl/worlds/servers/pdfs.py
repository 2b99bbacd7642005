"""The `pdfs` server: text of PDF pages.

Invariant: page numbers are 1-based in arguments and results. Tables come out as text lines, as in the
worlds this imitates; code execution with pdfplumber recovers their cells.
"""

from __future__ import annotations

from typing import Annotated

from deskrl.worlds.roots import WorldRoots
from deskrl.worlds.toolkit import ToolError


class PdfServer:
    """Tools over PDF documents."""

    TOOLS = ("read_pdf_pages",)

    def __init__(self, roots: WorldRoots) -> None:
        self._root = roots.filesystem

    def read_pdf_pages(
        self,
        file_path: Annotated[str, "Path of a .pdf file"],
        pages: Annotated[list[int] | None, "Page numbers from 1; all pages when left out"] = None,
    ) -> str:
        """Read the text of a PDF's pages."""
        path = self._root.file(file_path)
        from pypdf import PdfReader
        from pypdf.errors import PyPdfError

        try:
            reader = PdfReader(path)
            count = len(reader.pages)
            wanted = pages or list(range(1, count + 1))
            outside = [page for page in wanted if not 1 <= page <= count]
            if outside:
                raise ToolError(f"{file_path!r} has pages 1 to {count}; there is no page {outside[0]}")
            texts = [(page, reader.pages[page - 1].extract_text()) for page in wanted]
        except PyPdfError as error:
            raise ToolError(f"{file_path!r} is not a readable PDF: {error}") from error
        return "\n\n".join(f"[page {page} of {count}]\n{text}" for page, text in texts)
