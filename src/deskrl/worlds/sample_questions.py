"""What the sample tasks ask: questions about the sample world, their criteria and gold answers.

Model: a `SampleTask` is a question, what its answer must hold, and a gold answer; `sample_tasks` turns each
into a task directory.

Invariants
- Every task has a criterion that needs a fact from a file or mail of the world, one that names whom or what
  the question is about, and at least one on the form of the answer. The last two are what a very small or an
  untrained model meets now and then: without them all samples of a group would score 0 and a test run would
  have nothing to learn from.
- Every gold answer meets all criteria; an empty answer meets none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
