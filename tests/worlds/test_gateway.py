"""The world's contract, over both transports, with the public MCP client against a real process."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from mcp.shared.exceptions import McpError
from world_server import Gateway, command, start

from deskrl.worlds.sample import SERVERS
from deskrl.worlds.sample_tasks import CORE_TOOLS


def packed(files: Mapping[str, bytes], link: str | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        if link:
            info = tarfile.TarInfo("link")
            info.type, info.linkname = tarfile.SYMTYPE, link
            tar.addfile(info)
    return buffer.getvalue()


async def populate(gateway: Gateway, archive: bytes, subsystem: str = "filesystem") -> tuple[int, dict[str, Any]]:
    async with gateway.http() as http:
        answer = await http.post(f"/data/populate?subsystem={subsystem}", files={"archive": ("a.tar.gz", archive)})
    return answer.status_code, answer.json()


class TestTools:
    async def test_every_declared_server_has_tools(self, gateway: Gateway) -> None:
        async with gateway.session() as session:
            tools = (await session.list_tools()).tools
        names = [tool.name for tool in tools]
        assert {name.split("_")[0] for name in names} == set(SERVERS)
        assert len(set(names)) == len(names)
        assert set(CORE_TOOLS) <= set(names)
        for tool in tools:
            assert tool.description
            assert tool.inputSchema["type"] == "object"
            assert set(tool.inputSchema["required"]) <= set(tool.inputSchema["properties"])

    async def test_filesystem(self, gateway: Gateway) -> None:
        assert "model.xlsx" in await gateway.call("filesystem_list_files", path="/deals")
        assert "9 March" in await gateway.call("filesystem_read_text_file", file_path="/team/notes.md")
        assert await gateway.call("filesystem_search_files", pattern="*.PDF") == "/deals/terms.pdf"

    async def test_excel(self, gateway: Gateway) -> None:
        text = await gateway.call("excel_read_tab", file_path="/deals/model.xlsx", cell_range="A4:D4")
        assert text.splitlines()[1] == "A4: 2025 | B4: 44900 | C4: 36380 | D4: =B4-C4"
        tabs = json.loads(await gateway.call("excel_list_tabs_in_spreadsheet", file_path="/deals/model.xlsx"))["tabs"]
        assert [tab["name"] for tab in tabs] == ["Forecast", "Debt"]

    async def test_excel_edits_are_all_or_nothing(self, gateway: Gateway) -> None:
        path = "/edit.xlsx"
        await gateway.call("excel_create_spreadsheet", file_path=path, rows=[["a", 1], ["b", "=B1*2"]])
        set_cell = {"op": "set_cell", "cell": "A1", "value": "changed"}
        ok, text = await gateway.outcome("excel_edit_spreadsheet", file_path=path, operations=[set_cell, {"op": "no"}])
        assert not ok
        assert "operations[1]: unknown op 'no'" in text
        assert "A1: a" in await gateway.call("excel_read_tab", file_path=path)
        # Models write containers as JSON strings.
        await gateway.call("excel_edit_spreadsheet", file_path=path, operations=json.dumps([set_cell]))
        assert "A1: changed | B1: 1" in await gateway.call("excel_read_tab", file_path=path)
        assert (gateway.filesystem / "edit.xlsx").stat().st_mode & 0o666 == 0o666

    async def test_pdfs(self, gateway: Gateway) -> None:
        text = await gateway.call("pdfs_read_pdf_pages", file_path="/deals/terms.pdf", pages=[2])
        assert text.startswith("[page 2 of 2]")
        assert "1,250,000" in text
        ok, text = await gateway.outcome("pdfs_read_pdf_pages", file_path="/deals/terms.pdf", pages=[3])
        assert (ok, "has pages 1 to 2" in text) == (False, True)

    async def test_word(self, gateway: Gateway) -> None:
        text = await gateway.call("word_read_document_content", file_path="/deals/memo.docx")
        assert "62.5 million" in text
        assert "Mossland | 8.1x" in text

    async def test_mail(self, gateway: Gateway) -> None:
        found = json.loads(await gateway.call("mail_search_mail", query="pasteuriser"))
        assert found["total"] == 1
        mail = json.loads(await gateway.call("mail_read_mail", mail_id=found["mails"][0]["id"]))
        assert "2,150 thousand" in mail["body"]
        inbox = (gateway.world / "apps_data/mail/inbox.mbox").read_bytes()
        sent = json.loads(await gateway.call("mail_reply_mail", mail_id=mail["id"], body="Thanks"))
        assert "elena.marsh@brightwater.example" in sent["to"]
        reply = json.loads(await gateway.call("mail_read_mail", mail_id=sent["id"]))
        assert (reply["folder"], reply["body"]) == ("sent", "Thanks")
        assert (gateway.world / "apps_data/mail/inbox.mbox").read_bytes() == inbox


class TestErrors:
    async def test_wrong_arguments_are_explained_to_the_model(self, gateway: Gateway) -> None:
        for arguments, expected in (
            ({}, "argument 'file_path' is required"),
            ({"file_path": "/deals/model.xlsx", "tab": 1}, "unknown argument 'tab'; accepted: file_path, tab_index"),
            ({"file_path": "/deals/model.xlsx", "tab_index": "one"}, "must be of type integer"),
            ({"file_path": "/deals/model.xlsx", "tab_index": 9}, "tab_index must be between 0 and 1"),
            ({"file_path": "/deals/memo.docx"}, "is not an .xlsx file"),
            ({"file_path": "/deals/gone.xlsx"}, "use filesystem_search_files"),
            ({"file_path": "/filesystem/deals/model.xlsx"}, "without the /filesystem prefix"),
        ):
            ok, text = await gateway.outcome("excel_read_tab", **arguments)
            assert not ok
            assert text.startswith("Error: ")
            assert expected in text

    @pytest.mark.parametrize("path", ["/../../etc/passwd", "../secret", "/deals/../../secret", "/escape", "/up/secret"])
    async def test_no_path_leads_out_of_the_world(self, gateway: Gateway, path: str) -> None:
        (gateway.world / "secret").write_text("hidden")
        for name, target in (("escape", gateway.world / "secret"), ("up", gateway.world)):
            link = gateway.filesystem / name
            if not link.is_symlink():
                link.symlink_to(target)
        ok, text = await gateway.outcome("filesystem_read_text_file", file_path=path)
        assert not ok
        assert "escapes the file system" in text
        ok, text = await gateway.outcome("excel_create_spreadsheet", file_path="/up/new.xlsx")
        assert (ok, (gateway.world / "new.xlsx").exists()) == (False, False)

    async def test_a_broken_document_is_no_crash(self, gateway: Gateway) -> None:
        for name, tool in (
            ("bad.xlsx", "excel_read_tab"),
            ("bad.pdf", "pdfs_read_pdf_pages"),
            ("bad.docx", "word_read_document_content"),
        ):
            (gateway.filesystem / name).write_bytes(b"not a document")
            ok, text = await gateway.outcome(tool, file_path=f"/{name}")
            assert not ok
            assert f"'/{name}' is not a readable" in text

    async def test_unknown_tools_and_methods(self, gateway: Gateway) -> None:
        async with gateway.session() as session:
            with pytest.raises(McpError, match="unknown tool 'excel_fly'"):
                await session.call_tool("excel_fly", {})
        async with gateway.http() as http:
            answer = await http.post("/mcp", json={"jsonrpc": "2.0", "id": 7, "method": "fly"})
            assert answer.json()["error"]["code"] == -32601
            assert (await http.post("/mcp", content=b"{")).json()["error"]["code"] == -32700

    async def test_foreign_origins_are_refused(self, gateway: Gateway) -> None:
        message = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
        async with gateway.http() as http:
            assert (await http.post("/mcp", json=message, headers={"origin": "http://evil.example"})).status_code == 403
            assert (await http.post("/mcp", json=message, headers={"origin": "http://localhost:3"})).status_code == 200


class TestState:
    async def test_health(self, gateway: Gateway) -> None:
        async with gateway.http() as http:
            answer = await http.get("/health")
        assert (answer.status_code, answer.text) == (200, "OK")

    async def test_apps_replaces_the_servers_or_changes_nothing(self, gateway: Gateway) -> None:
        async with gateway.http() as http, gateway.session() as session:
            for body in ({"mcpServers": {"excel": {}, "exel": {}}}, {"mcpServers": {}}, {}, []):
                refused = await http.post("/apps", json=body)
                assert refused.status_code == 400
                assert "mcpServers" in refused.json()["detail"]
            assert len((await session.list_tools()).tools) > 15
            assert (await http.post("/apps", json={"mcpServers": {"pdfs": {"transport": "stdio"}}})).status_code == 200
            assert [tool.name for tool in (await session.list_tools()).tools] == ["pdfs_read_pdf_pages"]
            whole = {"mcpServers": {name: {} for name in SERVERS}}
            assert (await http.post("/apps", json=whole)).status_code == 200

    async def test_populate_and_snapshot(self, gateway: Gateway) -> None:
        status, answer = await populate(gateway, packed({"new/a.txt": b"alpha"}))
        assert (status, answer) == (200, {"objects_added": 1, "subsystem": "filesystem", "extracted_bytes": 5})
        status, answer = await populate(gateway, packed({"chat/c.json": b"{}"}), ".apps_data")
        assert status == 200
        assert await gateway.call("filesystem_read_text_file", file_path="/new/a.txt") == "alpha"
        async with gateway.http() as http:
            first, second = [await http.post("/data/snapshot") for _ in range(2)]
        assert first.content == second.content
        with tarfile.open(fileobj=io.BytesIO(first.content)) as tar:
            members = {member.name: member for member in tar.getmembers()}
            content = tar.extractfile("filesystem/new/a.txt")
            assert content is not None
            assert content.read() == b"alpha"
        assert {"filesystem/deals/model.xlsx", ".apps_data/chat/c.json", ".apps_data/mail/inbox.mbox"} <= set(members)
        assert all(member.isfile() or member.isdir() for member in members.values())

    @pytest.mark.parametrize(
        ("archive", "subsystem", "detail"),
        [
            (packed({"../out": b"x"}), "filesystem", "not an acceptable tar.gz"),
            (packed({"ok": b"x"}, link="/etc/passwd"), "filesystem", "neither a file nor a directory"),
            (b"junk", "filesystem", "not an acceptable tar.gz"),
            (packed({"a": b"x" * 9999})[:60], "filesystem", "not an acceptable tar.gz"),
            (packed({"a": b"x"}), "elsewhere", "unknown subsystem 'elsewhere'"),
        ],
    )
    async def test_bad_archives_write_nothing(
        self, gateway: Gateway, archive: bytes, subsystem: str, detail: str
    ) -> None:
        before = sorted(gateway.world.rglob("*"))
        status, answer = await populate(gateway, archive, subsystem)
        assert status == 400
        assert detail in answer["detail"]
        assert sorted(gateway.world.rglob("*")) == before

    async def test_populate_without_an_archive(self, gateway: Gateway) -> None:
        async with gateway.http() as http:
            answer = await http.post("/data/populate?subsystem=filesystem", files={"other": b"x"})
        assert (answer.status_code, "archive" in answer.json()["detail"]) == (400, True)

    async def test_edits_at_once_lose_nothing(self, gateway: Gateway) -> None:
        path = "/many.xlsx"
        await gateway.call("excel_create_spreadsheet", file_path=path)
        async with gateway.session() as session:
            calls = [
                session.call_tool("excel_add_content_text", {"file_path": path, "cell": f"A{n}", "value": str(n)})
                for n in range(1, 9)
            ]
            assert not any(result.isError for result in await asyncio.gather(*calls))
        text = await gateway.call("excel_read_tab", file_path=path)
        assert [f"A{n}: {n}" for n in range(1, 9)] == text.splitlines()[1:]


class TestStart:
    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ('{"mcpServers": {"exel": {}}}', "mcpServers.exel: unknown server; this gateway has excel, filesystem"),
            ('{"mcpServers": {}}', "expected a non-empty object"),
            ("{", "Expecting property name"),
        ],
    )
    def test_a_bad_configuration_stops_it(self, world: Path, config: str, message: str) -> None:
        (world / "app/tools/mcp.json").write_text(config)
        done = subprocess.run(command(world, "--port", "0"), capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert message in done.stderr

    def test_a_missing_directory_stops_it(self, world: Path) -> None:
        (world / "app/tools/mcp.json").rename(world / "mcp.json")
        done = subprocess.run(command(world, "--port", "0"), capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert "mcp.json" in done.stderr
        done = subprocess.run(command(world / "gone", "--port", "0"), capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert "no such directory; create it or correct the option" in done.stderr

    def test_an_address_in_use_stops_it(self, world: Path) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = str(taken.getsockname()[1])
            done = subprocess.run(command(world, "--port", port), capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert f"cannot listen on 127.0.0.1:{port}" in done.stderr

    def test_a_stale_socket_file_is_replaced(self, pristine: Path) -> None:
        with tempfile.TemporaryDirectory(dir="/tmp") as run:
            with socket.socket(socket.AF_UNIX) as stale:
                stale.bind(f"{run}/s")
            gateway = start(pristine, "uds", Path(run))
            gateway.process.terminate()
            assert gateway.process.wait(60) in (0, -signal.SIGTERM)

    def test_a_world_with_all_tools_mounted_has_loaded_no_heavy_library(self, world: Path) -> None:
        script = f"""
import json, sys
from pathlib import Path
from deskrl.worlds.gateway import build_app, tools_from_config
from deskrl.worlds.roots import Root, WorldRoots
world = Path({str(world)!r})
roots = WorldRoots(Root.at(world / "filesystem"), Root.at(world / "apps_data"))
tools = tools_from_config(json.loads((world / "app/tools/mcp.json").read_text()), roots)
build_app(roots, tools)
heavy = ("openpyxl", "docx", "pypdf", "pdfplumber", "reportlab", "torch", "pydantic", "mcp", "harbor", "numpy")
print([name for name in heavy if name in sys.modules])
tools["excel_read_tab"].call({{"file_path": "/deals/model.xlsx"}})
print("openpyxl" in sys.modules)
"""
        done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, timeout=60)
        assert done.stdout.split("\n")[:2] == ["[]", "True"], done.stderr
