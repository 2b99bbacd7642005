"""The sample world: a small made-up company, so that the whole pipeline runs without any private data.

Harlow & Pike, an advisory boutique, looks at buying Brightwater Dairy. `build_sample_world` writes a world
directory as sandboxes take it: `filesystem` (documents), `apps_data` (mail) and `app` (how to start it).

Invariants
- Each kind of file holds facts that no other file holds, so that a task can require a certain tool.
- The directory is complete or absent: it is built beside its place and renamed, and `manifest.json` names
  every file with its digest. A complete one is reused; anything else that stands there is refused unless
  it is an earlier sample world.
- Same code and library versions, same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from deskrl.worlds.sample_documents import Mail, write_mbox, write_pdf, write_word, write_workbook

MANIFEST = "manifest.json"
FORMAT = 1
"""Raised whenever the content below changes, so that older copies are rebuilt."""
SERVERS = ("filesystem", "excel", "mail", "pdfs", "word")
_TIME = 1772438400  # 2 March 2026, 08:00 UTC

_START = """#!/bin/bash
# Starts this world's tools: start.sh TASK_SLUG. Serves until it is killed.
set -eu
if [ -n "${DESKRL_WORLD_SOCKET:-}" ]; then
    set -- --uds "$DESKRL_WORLD_SOCKET"
else
    set -- --host 0.0.0.0 --port 8000
fi
exec "${DESKRL_PYTHON:-python3}" -I -m deskrl.worlds.gateway \\
    --filesystem /filesystem --apps-data /.apps_data --config /app/tools/mcp.json "$@"
"""

_NOTES = """# Kickoff notes: Project Heron

- Client: Harlow & Pike Partners Fund. Target: Brightwater Dairy, Ashford.
- Lead partner: Nora Pike. Analyst: Tom Reyes. Counsel: Gray & Oduya.
- The data room opens on 9 March and closes on 17 April.
- Site visit to the Ashford plant: 24 March, led by Ines Calder.
- Files: the model and the term sheet are in /deals, hours in /team/hours.csv.
"""

_HOURS = """name,role,hours,rate
Nora Pike,partner,18,420
Ines Calder,manager,47,260
Tom Reyes,analyst,62,140
"""

_FORECAST: list[list[str | int | float]] = [
    ["Year", "Revenue (k)", "Costs (k)", "EBITDA (k)"],
    [2023, 38400, 31900, "=B2-C2"],
    [2024, 41750, 34210, "=B3-C3"],
    [2025, 44900, 36380, "=B4-C4"],
    [2026, 48300, 38640, "=B5-C5"],
]
_DEBT: list[list[str | int | float]] = [
    ["Item", "Amount (k)"],
    ["Term loan", 12500],
    ["Leases", 1840],
    ["Cash", 3260],
    ["Net debt", "=B2+B3-B4"],
]
_MEMO: list[str | list[list[str]]] = [
    "Prepared by Nora Pike for the investment committee. Confidential.",
    "# Recommendation",
    "The recommended offer is 62.5 million for all shares of Brightwater Dairy.",
    "# Comparable deals",
    [
        ["Company", "EV / EBITDA"],
        ["Alder Foods", "7.2x"],
        ["Fenwick Creamery", "6.8x"],
        ["Mossland", "8.1x"],
    ],
    "# Risks",
    "The largest customer, Tolland Markets, makes up 34% of revenue. Milk prices are hedged until September.",
]
_TERMS = [
    [
        "Term sheet: Brightwater Dairy",
        "Buyer: Harlow & Pike Partners Fund",
        "Exclusivity: 45 days from signing",
        "Target closing date: 30 June 2026",
    ],
    [
        "Protections",
        "Break fee: 1,250,000 payable by the seller",
        "Escrow: 8% of the price for 18 months",
        "Governing law: England and Wales",
    ],
]
_TOM = "Tom Reyes <tom.reyes@harlowpike.example>"
_MAILS = [
    Mail(
        "capex-1@brightwater.example",
        "Elena Marsh <elena.marsh@brightwater.example>",
        _TOM,
        "Tue, 03 Mar 2026 09:12:00 +0000",
        "Tue Mar  3 09:12:00 2026",
        "Capital spending plan",
        "Dear Tom,\n\nthe new pasteuriser costs 2,150 thousand and is ordered for May.\n\nElena Marsh, CFO\n",
    ),
    Mail(
        "peg-2@harlowpike.example",
        "Ines Calder <ines.calder@harlowpike.example>",
        _TOM,
        "Wed, 04 Mar 2026 16:40:00 +0000",
        "Wed Mar  4 16:40:00 2026",
        "Working capital",
        "Tom, please use 4,375 thousand as the working capital peg in the model.\n\nInes\n",
    ),
    Mail(
        "filing-3@grayoduya.example",
        "Samuel Oduya <samuel@grayoduya.example>",
        _TOM,
        "Fri, 06 Mar 2026 11:05:00 +0000",
        "Fri Mar  6 11:05:00 2026",
        "Merger filing",
        "Tom,\n\nthe merger filing takes 30 working days. Tolland Markets must be told after signing.\n\nSamuel\n",
    ),
]


def build_sample_world(out: Path) -> Path:
    """Write the sample world to `out`, unless it is there already, and return `out`.

    Raises `FileExistsError` when something else is in the way.
    """
    out = Path(out)
    if is_sample_world(out):
        return out
    if out.exists() and not (out / MANIFEST).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not a sample world; give another path, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    build = Path(tempfile.mkdtemp(prefix=f".{out.name}.build-", dir=out.parent))
    try:
        _write(build)
        _replace(build, out)
    finally:
        shutil.rmtree(build, ignore_errors=True)
    return out


def is_sample_world(path: Path) -> bool:
    """Whether `path` holds a complete, unchanged sample world of this version."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        return bool(manifest == {"format": FORMAT, "files": _digests(path)})
    except (OSError, ValueError):
        return False


def _write(world: Path) -> None:
    files, mail, tools = world / "filesystem", world / "apps_data" / "mail", world / "app" / "tools"
    for folder in (files / "deals", files / "team", mail, tools):
        folder.mkdir(parents=True)
    write_workbook(files / "deals" / "model.xlsx", {"Forecast": _FORECAST, "Debt": _DEBT})
    write_word(files / "deals" / "memo.docx", "Investment memo: Brightwater Dairy", _MEMO)
    write_pdf(files / "deals" / "terms.pdf", _TERMS)
    (files / "team" / "notes.md").write_text(_NOTES, encoding="utf-8")
    (files / "team" / "hours.csv").write_text(_HOURS, encoding="utf-8")
    write_mbox(mail / "inbox.mbox", _MAILS)
    (tools / "start.sh").write_text(_START, encoding="utf-8")
    config: dict[str, dict[str, dict[str, str]]] = {"mcpServers": {name: {} for name in SERVERS}}
    (tools / "mcp.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (tools / "required_secrets.txt").write_text("", encoding="utf-8")
    manifest = {"format": FORMAT, "files": _digests(world)}
    (world / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for path in sorted(world.rglob("*"), reverse=True):
        # Tool servers run as several users, all of which may edit documents.
        path.chmod(0o777 if path.is_dir() or path.name == "start.sh" else 0o666)
        os.utime(path, (_TIME, _TIME))
    world.chmod(0o755)


def _digests(world: Path) -> dict[str, str]:
    return {
        str(path.relative_to(world)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(world.rglob("*"))
        if path.is_file() and path != world / MANIFEST
    }


def _replace(build: Path, out: Path) -> None:
    """Put `build` in the place of `out`. Another process may be doing the same with the same content."""
    for _ in range(10):
        try:
            build.rename(out)
            return
        except OSError:
            if is_sample_world(out):
                return
            aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.old-", dir=out.parent))
            try:
                out.rename(aside)
            except FileNotFoundError:
                continue
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    raise FileExistsError(f"{out} cannot be replaced; end the processes that use it, or give another path")
