"""Tasks of the sample world, in the recipe's format, gradable without any judge model.

Model: a `SampleTask` is a question, what its answer must hold, and a gold answer. `build_sample_tasks`
writes each as a task directory with the stand-alone grader inside.

Invariants
- Every task has a criterion that needs a fact from a file or mail of the world (primary), one that names
  whom or what the question is about, and one on the form of the answer. The last two are what a very small
  or an untrained model meets now and then: without them all samples of a group would score 0 and a test
  run would have nothing to learn from.
- Every gold answer meets all criteria; an empty answer never does.
- A task directory is complete or absent, and the same code writes the same bytes.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deskrl.grading import standalone

WORLD_ID = "world_deskrl_sample"
WORLD_SHORT_NAME = "sample-harlow-pike"
CORE_TOOLS = (
    "filesystem_read_text_file",
    "excel_read_tab",
    "excel_create_spreadsheet",
    "mail_search_mail",
    "mail_read_mail",
    "pdfs_read_pdf_pages",
    "word_read_document_content",
)
"""Enough for every task here; with only these the tool prompt fits a context of 2,048 tokens."""

Check = dict[str, Any]


@dataclass(frozen=True)
class Form:
    """A criterion on the form of an answer. `pattern` never matches an empty answer."""

    criteria: str
    pattern: str


PLAIN = Form("Is plain text without brackets, braces or other markup", r"\A[^\[\]{}<>*#`|]+\Z")
UNQUOTED = Form("Is stated directly, without quotation marks", r"\A[^\"'`“”]+\Z")
UNBRACKETED = Form("Makes no remarks in parentheses", r"\A[^()]+\Z")
SHORT = Form("Is at most 60 words long", r"\A\s*(?:\S+\s+){0,59}\S+\s*\Z")
CAPITAL = Form("Begins with a capital letter or a figure", r"\A\s*[A-Z0-9]")


@dataclass(frozen=True)
class SampleTask:
    """One task: `facts` need the world's data, `about` is named in the question, `forms` judge its form."""

    slug: str
    question: str
    facts: tuple[tuple[str, Check], ...]
    about: tuple[str, Check]
    forms: tuple[Form, ...]
    gold: str
    output_file: str | None = None


def number(value: float, tolerance: float = 0.0) -> Check:
    """A number anywhere in the answer."""
    return {"kind": "number", "value": value, "tolerance": tolerance}


def mention(*names: str) -> Check:
    """One of `names`, in any case."""
    options = "|".join(name.replace(".", r"\.").replace(" ", r"\s+") for name in names)
    return {"kind": "regex", "pattern": f"(?i){options}"}


def mention_with_figure(name: str) -> Check:
    """`name` in any case, and a digit somewhere."""
    return {"kind": "regex", "pattern": rf"(?is)\A(?=.*{name})(?=.*\d)"}


SAMPLE_TASKS: tuple[SampleTask, ...] = (
    SampleTask(
        "revenue-2025",
        "What is Brightwater's revenue for 2025 in /deals/model.xlsx, tab Forecast? Answer in one sentence.",
        (("States revenue of 44,900 thousand", {"kind": "regex", "pattern": r"44[,.\s]?9(?:00|\b)"}),),
        ("Names Brightwater and gives a figure", mention_with_figure("brightwater")),
        (PLAIN, CAPITAL),
        "Brightwater Dairy expects revenue of 44,900 thousand for 2025.",
    ),
    SampleTask(
        "ebitda-2026",
        "Work out Brightwater's EBITDA for 2026 from /deals/model.xlsx (revenue less costs). One sentence.",
        (("States EBITDA of 9,660 thousand", {"kind": "regex", "pattern": r"9[,.\s]?66(?:0|\b)"}),),
        ("Speaks of EBITDA and gives a figure", mention_with_figure("ebitda")),
        (UNBRACKETED, CAPITAL),
        "EBITDA for 2026 is 9,660 thousand.",
    ),
    SampleTask(
        "net-debt",
        "What is the net debt in /deals/model.xlsx, tab 1 (Debt)? Answer in one sentence.",
        (("States net debt of 11,080 thousand", {"kind": "regex", "pattern": r"11[,.\s]?08(?:0|\b)"}),),
        ("Speaks of the debt and gives a figure", mention_with_figure("debt")),
        (UNQUOTED, SHORT),
        "Net debt is 11,080 thousand: term loan and leases less cash.",
    ),
    SampleTask(
        "offer-price",
        "Which offer does /deals/memo.docx recommend for Brightwater? Answer in one sentence.",
        (("States an offer of 62.5 million", {"kind": "regex", "pattern": r"62[.,]5"}),),
        ("Names Brightwater or the offer", mention("brightwater", "offer")),
        (PLAIN, SHORT),
        "The memo recommends an offer of 62.5 million for Brightwater.",
    ),
    SampleTask(
        "best-multiple",
        "Which comparable company in /deals/memo.docx has the highest EV / EBITDA, and how much? One sentence.",
        (("Names Mossland", mention("mossland")), ("States a multiple of 8.1", number(8.1))),
        ("Speaks of a company or a multiple", mention("company", "multiple", "ebitda")),
        (UNBRACKETED,),
        "Mossland has the highest multiple, 8.1x EBITDA.",
    ),
    SampleTask(
        "exclusivity",
        "How many days of exclusivity does /deals/terms.pdf give? Answer in one sentence.",
        (("States 45 days", number(45)),),
        ("Speaks of exclusivity or the term sheet", mention("exclusiv", "terms.pdf", "term sheet")),
        (PLAIN, CAPITAL),
        "The term sheet gives exclusivity of 45 days from signing.",
    ),
    SampleTask(
        "break-fee",
        "How large is the break fee in /deals/terms.pdf, and who pays it? Answer in one sentence.",
        (("States 1,250,000", number(1_250_000)), ("Says that the seller pays", mention("seller"))),
        ("Speaks of the fee", mention("fee")),
        (UNQUOTED,),
        "The break fee is 1,250,000 and the seller pays it.",
    ),
    SampleTask(
        "data-room",
        "When does the data room open according to /team/notes.md? Answer in one sentence.",
        (
            (
                "Gives 9 March",
                {"kind": "regex", "pattern": r"(?i)\b9(?:th)?\s+(?:of\s+)?March\b|\bMarch\s+9(?:th)?\b"},
            ),
        ),
        ("Speaks of the data room", mention("data room")),
        (UNBRACKETED, CAPITAL),
        "The data room opens on 9 March.",
    ),
    SampleTask(
        "analyst-hours",
        "How many hours did Tom Reyes work according to /team/hours.csv? Answer in one sentence.",
        (("States 62 hours", number(62)),),
        ("Names Tom Reyes", mention("tom", "reyes")),
        (UNQUOTED, SHORT),
        "Tom Reyes worked 62 hours.",
    ),
    SampleTask(
        "pasteuriser",
        "Elena Marsh wrote a mail about a new pasteuriser. What does it cost? Answer in one sentence.",
        (("States 2,150 thousand", {"kind": "regex", "pattern": r"2[,.\s]?15(?:0|\b)"}),),
        ("Names Elena Marsh or the pasteuriser", mention("elena", "marsh", "pasteuri[sz]er")),
        (PLAIN, SHORT),
        "Elena Marsh says that the new pasteuriser costs 2,150 thousand.",
    ),
    SampleTask(
        "offer-multiple",
        "Divide the offer in /deals/memo.docx by the 2025 EBITDA in /deals/model.xlsx. One sentence.",
        (("States a multiple of 7.3", number(7.336, 0.05)),),
        ("Speaks of the offer or of EBITDA", mention("offer", "ebitda")),
        (UNBRACKETED, CAPITAL),
        "The offer is 7.3 times the EBITDA of 2025.",
    ),
    SampleTask(
        "working-capital",
        "Ines Calder sent a mail about working capital. Write the peg into a new workbook /deals/peg.xlsx, "
        "then state it in one sentence.",
        (
            ("Writes a workbook /deals/peg.xlsx", {"kind": "file_exists", "path": "deals/peg.xlsx", "min_bytes": 1000}),
            ("States 4,375 thousand", {"kind": "regex", "pattern": r"4[,.\s]?375\b"}),
        ),
        ("Speaks of working capital or the peg", mention("working capital", "peg")),
        (PLAIN,),
        "The working capital peg is 4,375 thousand; it is now in peg.xlsx.",
        output_file="deals/peg.xlsx",
    ),
)

_TASK_TOML = """schema_version = "1.4"

[metadata]
category = "knowledge-work"
difficulty = "easy"

[agent]
timeout_sec = 300.0

[verifier]
timeout_sec = 60.0

[environment]
cpus = 1
memory_mb = 2048
"""
_DOCKERFILE = "# Not built: the real environment is the sample world, see deskrl.worlds.sample.\nFROM scratch\n"
_TEST_SH = """#!/bin/bash
# Grades the trial: /logs/verifier gets reward.json, or grading_error.json when it could not be graded.
exec "${DESKRL_PYTHON:-python3}" -I /tests/grade.py \\
    --trajectory /logs/agent/trajectory.json --verifiers /tests/verifiers.json \\
    --filesystem /filesystem --out /logs/verifier
"""


def build_sample_tasks(out: Path) -> list[Path]:
    """Write every sample task below `out`, each in a directory of its name; return these, sorted.

    A task that is there already is replaced. Raises `FileExistsError` for a directory that is no sample task.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    return sorted(_build(task, index, out) for index, task in enumerate(SAMPLE_TASKS, start=1))


def _build(task: SampleTask, index: int, out: Path) -> Path:
    target = out / task.slug
    files = task_files(task, index)
    if _same(target, files):
        return target
    if target.exists() and not _is_ours(target):
        raise FileExistsError(f"{target} exists and is not a sample task; give another path, or remove it")
    build = Path(tempfile.mkdtemp(prefix=f".{task.slug}.build-", dir=out))
    try:
        for name, text in files.items():
            path = build / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755 if name.endswith(".sh") else 0o644)
        build.chmod(0o755)
        shutil.rmtree(target, ignore_errors=True)
        build.rename(target)
    except OSError:
        # Another process may have put the same task there in the meantime.
        if not _same(target, files):
            raise
    finally:
        shutil.rmtree(build, ignore_errors=True)
    return target


def task_files(task: SampleTask, index: int) -> dict[str, str]:
    """Return the task's files: relative path to text."""
    task_id = f"task_sample_{index:02d}"
    archipelago = {
        "task_id": task_id,
        "task_name": f"SAMPLE_{index:02d}",
        "task_slug": task.slug,
        "world_id": WORLD_ID,
        "world_short_name": WORLD_SHORT_NAME,
        "ecr_image": "",
        "required_env_keys": [],
        "needs_snapshot": False,
    }
    gold = [{"gold_response": task.gold, "gold_response_type": "message_in_console"}]
    return {
        "instruction.md": task.question + "\n",
        "task.toml": _TASK_TOML,
        "archipelago.json": _json(archipelago),
        "environment/Dockerfile": _DOCKERFILE,
        "tests/test.sh": _TEST_SH,
        "tests/grade.py": Path(standalone.__file__).read_text(encoding="utf-8"),
        "tests/verifiers.json": _json(_verifiers(task, task_id)),
        "tests/golden_responses.json": _json(gold),
    }


def _verifiers(task: SampleTask, task_id: str) -> list[dict[str, Any]]:
    criteria = [(text, check, True) for text, check in task.facts]
    criteria.append((*task.about, False))
    criteria += [(form.criteria, {"kind": "regex", "pattern": form.pattern}, False) for form in task.forms]
    return [
        {
            "verifier_id": f"{task_id}_v{index}",
            "verifier_version": 1,
            "world_id": WORLD_ID,
            "task_id": task_id,
            "eval_config_id": "offline",
            "verifier_values": {
                "criteria": text,
                "is_primary_objective": primary,
                "expected_file_type": (
                    "Spreadsheets" if check["kind"] == "file_exists" else "Final Answer Only (No Files)"
                ),
                "offline": check,
            },
            "verifier_index": index,
            "verifier_dependencies": None,
        }
        for index, (text, check, primary) in enumerate(criteria)
    ]


def _same(target: Path, files: dict[str, str]) -> bool:
    try:
        return all((target / name).read_text(encoding="utf-8") == text for name, text in files.items())
    except (OSError, UnicodeDecodeError):
        return False


def _is_ours(target: Path) -> bool:
    try:
        document = json.loads((target / "archipelago.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and document.get("world_id") == WORLD_ID


def _json(document: Any) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
