"""The sample world: its files open with the usual libraries, carry their facts, and come out the same each time."""

from __future__ import annotations

import json
import mailbox
import os
import shutil
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import docx
import openpyxl
import pypdf
import pytest

from deskrl.worlds.sample import SERVERS, build_sample_world, is_sample_world


def tree(world: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(world)): (path.read_bytes(), stat.S_IMODE(path.stat().st_mode))
        for path in world.rglob("*")
        if path.is_file()
    }


def test_the_workbook_has_values_and_live_formulas(pristine: Path) -> None:
    book = openpyxl.load_workbook(pristine / "filesystem/deals/model.xlsx")
    assert book.sheetnames == ["Forecast", "Debt"]
    forecast, debt = book["Forecast"], book["Debt"]
    assert (forecast["A4"].value, forecast["B4"].value, forecast["D4"].value) == (2025, 44900, "=B4-C4")
    assert forecast["B5"].value - forecast["C5"].value == 9660
    assert debt["B5"].value == "=B2+B3-B4"
    assert debt["B2"].value + debt["B3"].value - debt["B4"].value == 11080
    assert 62500 / (forecast["B4"].value - forecast["C4"].value) == pytest.approx(7.336, abs=0.001)


def test_the_memo(pristine: Path) -> None:
    memo = docx.Document(str(pristine / "filesystem/deals/memo.docx"))
    assert any("62.5 million" in paragraph.text for paragraph in memo.paragraphs)
    (table,) = memo.tables
    multiples = {row.cells[0].text: row.cells[1].text for row in table.rows[1:]}
    assert max(multiples, key=lambda name: float(multiples[name].rstrip("x"))) == "Mossland"


def test_the_term_sheet(pristine: Path) -> None:
    first, second = pypdf.PdfReader(pristine / "filesystem/deals/terms.pdf").pages
    assert "Exclusivity: 45 days" in first.extract_text()
    assert "Break fee: 1,250,000 payable by the seller" in second.extract_text()


def test_plain_files(pristine: Path) -> None:
    assert "opens on 9 March" in (pristine / "filesystem/team/notes.md").read_text()
    assert "Tom Reyes,analyst,62,140" in (pristine / "filesystem/team/hours.csv").read_text().splitlines()


def test_the_mailbox(pristine: Path) -> None:
    box = mailbox.mbox(pristine / "apps_data/mail/inbox.mbox", create=False)
    mails = {str(mail["Subject"]): mail for mail in box}
    assert list(mails) == ["Capital spending plan", "Working capital", "Merger filing"]
    assert b"costs 2,150 thousand" in mails["Capital spending plan"].get_payload(decode=True)
    assert b"4,375 thousand" in mails["Working capital"].get_payload(decode=True)


def test_each_fact_is_in_one_file_only(pristine: Path) -> None:
    texts = {
        path.name: path.read_text(errors="replace")
        for folder in ("filesystem", "apps_data")
        for path in (pristine / folder).rglob("*")
        if path.suffix in (".md", ".csv", ".mbox")
    }
    memo = docx.Document(str(pristine / "filesystem/deals/memo.docx"))
    texts["memo.docx"] = "\n".join(p.text for p in memo.paragraphs)
    pdf = pypdf.PdfReader(pristine / "filesystem/deals/terms.pdf")
    texts["terms.pdf"] = "\n".join(page.extract_text() for page in pdf.pages)
    for fact in ("62.5", "1,250,000", "45 days", "9 March", "2,150", "4,375"):
        assert len([name for name, text in texts.items() if fact in text]) == 1, fact


def test_same_bytes_each_time(pristine: Path, tmp_path: Path) -> None:
    assert tree(build_sample_world(tmp_path / "again")) == tree(pristine)


def test_every_user_may_edit_documents(pristine: Path) -> None:
    for path in [*(pristine / "filesystem").rglob("*"), *(pristine / "apps_data").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o777 if path.is_dir() else 0o666), path


def test_a_complete_world_is_left_alone(world: Path) -> None:
    assert is_sample_world(world)
    before = {path: path.stat().st_ino for path in world.rglob("*")}
    assert build_sample_world(world) == world
    assert {path: path.stat().st_ino for path in world.rglob("*")} == before


def test_a_damaged_world_is_rebuilt(world: Path, pristine: Path) -> None:
    (world / "filesystem/team/notes.md").write_text("changed")
    (world / "filesystem/extra").write_text("x")
    assert not is_sample_world(world)
    build_sample_world(world)
    assert tree(world) == tree(pristine)
    assert [path.name for path in world.parent.iterdir()] == ["world"]


def test_foreign_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(FileExistsError, match="is not a sample world; give another path"):
        build_sample_world(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(FileExistsError):
        build_sample_world(tmp_path / "mine")


def test_builders_at_once_leave_one_whole_world(tmp_path: Path) -> None:
    out = tmp_path / "world"
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(build_sample_world, [out] * 4)) == {out}
    assert is_sample_world(out)
    assert [path.name for path in tmp_path.iterdir()] == ["world"]


class TestStartScript:
    def arguments(self, world: Path, **environ: str) -> str:
        """What start.sh would run, with echo in the interpreter's place."""
        environ = {"PATH": os.environ["PATH"], "DESKRL_PYTHON": shutil.which("echo") or "echo", **environ}
        script = world / "app/tools/start.sh"
        return subprocess.run([script, "slug"], env=environ, capture_output=True, text=True, check=True).stdout.strip()

    def test_listens_on_the_socket_it_is_given(self, pristine: Path) -> None:
        assert self.arguments(pristine, DESKRL_WORLD_SOCKET="/run/w s") == (
            "-I -m deskrl.worlds.gateway --filesystem /filesystem --apps-data /.apps_data "
            "--config /app/tools/mcp.json --uds /run/w s"
        )

    @pytest.mark.parametrize("environ", [{}, {"DESKRL_WORLD_SOCKET": ""}])
    def test_or_on_port_8000(self, pristine: Path, environ: dict[str, str]) -> None:
        assert self.arguments(pristine, **environ).endswith("--config /app/tools/mcp.json --host 0.0.0.0 --port 8000")


def test_the_configuration_names_the_servers(pristine: Path) -> None:
    assert set(json.loads((pristine / "app/tools/mcp.json").read_text())["mcpServers"]) == set(SERVERS)
    assert (pristine / "app/tools/required_secrets.txt").read_text() == ""
