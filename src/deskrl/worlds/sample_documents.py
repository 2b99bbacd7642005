"""Writers of the sample world's office files: the same content gives the same bytes.

Model: each writer takes plain Python values and a path. The document libraries stamp the time of writing
into what they save; the stamps are replaced here, in the zip container of .xlsx and .docx and, for .pdf,
by reportlab's own invariant mode.

Invariant: a file's bytes depend on its content and the installed library versions only.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.message import EmailMessage
from email.policy import SMTP
from pathlib import Path

Cell = str | int | float
STAMP = "2026-03-02T08:00:00Z"
_ZIP_TIME = (2026, 3, 2, 8, 0, 0)
_CORE_TIMES = re.compile(rb"(<dcterms:(created|modified)[^>]*>)[^<]*(</dcterms:)")


@dataclass(frozen=True)
class Mail:
    """One received mail. `date` is an RFC 5322 date; `envelope_date` the asctime form of the mbox line."""

    message_id: str
    sender: str
    to: str
    date: str
    envelope_date: str
    subject: str
    body: str


def write_workbook(path: Path, tabs: Mapping[str, Sequence[Sequence[Cell]]]) -> None:
    """Write an .xlsx; a text cell that starts with `=` is a formula, without a cached result."""
    from openpyxl import Workbook
    from openpyxl.styles import Font

    book = Workbook()
    book.remove(book.worksheets[0])
    for title, rows in tabs.items():
        tab = book.create_sheet(title)
        for row in rows:
            tab.append(list(row))
        for cell in tab[1]:
            cell.font = Font(bold=True)
    buffer = io.BytesIO()
    book.save(buffer)
    path.write_bytes(_without_times(buffer.getvalue()))


def write_word(path: Path, title: str, blocks: Sequence[str | Sequence[Sequence[str]]]) -> None:
    """Write a .docx: a heading, then paragraphs (text; `# ` makes a heading) and tables (rows of cells)."""
    import docx

    document = docx.Document()
    document.add_heading(title, level=1)
    for block in blocks:
        if isinstance(block, str):
            if block.startswith("# "):
                document.add_heading(block[2:], level=2)
            else:
                document.add_paragraph(block)
            continue
        table = document.add_table(rows=0, cols=len(block[0]))
        for row in block:
            for cell, text in zip(table.add_row().cells, row, strict=True):
                cell.text = text
    buffer = io.BytesIO()
    document.save(buffer)
    path.write_bytes(_without_times(buffer.getvalue()))


def write_pdf(path: Path, pages: Sequence[Sequence[str]]) -> None:
    """Write a .pdf with one line of text per entry; the first line of a page is its title."""
    from reportlab.lib.pagesizes import A4
    from reportlab.pdfgen.canvas import Canvas

    canvas = Canvas(str(path), pagesize=A4, invariant=1)
    for lines in pages:
        y = A4[1] - 72
        for number, line in enumerate(lines):
            canvas.setFont("Helvetica-Bold" if number == 0 else "Helvetica", 15 if number == 0 else 11)
            canvas.drawString(72, y, line)
            y -= 30 if number == 0 else 18
        canvas.showPage()
    canvas.save()


def write_mbox(path: Path, mails: Sequence[Mail]) -> None:
    """Write an mbox, the mails in the given order."""
    text = b""
    for mail in mails:
        message = EmailMessage(policy=SMTP.clone(linesep="\n"))
        message["From"], message["To"], message["Date"] = mail.sender, mail.to, mail.date
        message["Subject"], message["Message-ID"] = mail.subject, f"<{mail.message_id}>"
        message.set_content(mail.body)
        content = re.sub(rb"(?m)^(>*From )", rb">\1", message.as_bytes())
        text += f"From {mail.message_id} {mail.envelope_date}\n".encode() + content.rstrip(b"\n") + b"\n\n"
    path.write_bytes(text)


def _without_times(container: bytes) -> bytes:
    """Return an Office file with all times in it, of zip entries and of its core properties, set to `STAMP`."""
    output = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(container)) as source,
        zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            data = source.read(name)
            if name == "docProps/core.xml":
                data = _CORE_TIMES.sub(rb"\g<1>" + STAMP.encode() + rb"\g<3>", data)
            info = zipfile.ZipInfo(name, _ZIP_TIME)
            info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o600 << 16
            target.writestr(info, data)
    return output.getvalue()
