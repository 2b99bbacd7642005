"""Ours against vLLM 0.23.0's own parsers on a shared corpus: the same result, or a listed difference with its reason.

`corpus/record.py` recorded vLLM's results. A turn that is refused here agrees with vLLM if vLLM runs no call in it.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from deskrl.tokens.parsing import FAMILIES, Outcome, ParsedTurn, parser_for

CORPUS = Path(__file__).parent.parent / "corpus"
FILES = {path.stem: json.loads(path.read_text()) for path in CORPUS.glob("*.json") if path.stem != "differences"}
DIFFERENCES = json.loads((CORPUS / "differences.json").read_text())
CASES = {f"{stem}/{case['id']}": (corpus, case) for stem, corpus in FILES.items() for case in corpus["cases"]}


def parse(key: str) -> ParsedTurn:
    corpus, case = CASES[key]
    parser = parser_for(corpus["family"], prefilled_thought=case.get("prefilled", False))
    return parser.parse(case["text"], corpus["tools"], truncated=case.get("truncated", False))


def calls(turn: ParsedTurn) -> list[dict[str, Any]]:
    return [{"name": call.name, "arguments": call.arguments} for call in turn.calls]


def same(left: Any, right: Any) -> bool:
    """Equal as JSON: 1 and 1.0 are one number, 1 and true are not one value."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def agrees(turn: ParsedTurn, vllm: dict[str, Any]) -> bool:
    if not same(calls(turn), vllm.get("calls", [])):
        return False
    if turn.outcome is not Outcome.OK:
        return True
    texts = [(vllm.get(name) or "").strip() for name in ("content", "reasoning")]
    return "error" not in vllm and [turn.content, turn.reasoning or ""] == texts


@pytest.mark.parametrize("key", sorted(CASES))
def test_the_result_is_vllms_or_a_listed_difference(key: str) -> None:
    turn, vllm = parse(key), CASES[key][1]["expected"]
    listed = DIFFERENCES["cases"].get(key)
    if listed is None:
        assert agrees(turn, vllm), f"ours: {turn}\nvLLM: {vllm}"
        return
    assert not agrees(turn, vllm), "listed as a difference, but it is none any more"
    assert DIFFERENCES["why"][listed["why"]]
    assert (turn.outcome, turn.malformed and turn.malformed.kind) == (listed["outcome"], listed.get("kind"))
    if turn.outcome is Outcome.OK:
        assert same(calls(turn), listed["calls"])
        assert (turn.content, turn.reasoning) == (listed["content"], listed["reasoning"])


def test_the_differences_name_cases_and_every_reason_is_used() -> None:
    assert set(DIFFERENCES["cases"]) <= set(CASES)
    assert {listed["why"] for listed in DIFFERENCES["cases"].values()} == set(DIFFERENCES["why"])


def test_the_corpus_covers_every_family_and_outcome() -> None:
    sizes = Counter(corpus["family"] for corpus, _ in CASES.values())
    assert set(sizes) == set(FAMILIES)
    assert min(sizes.values()) >= 15
    for family in FAMILIES:
        found = {parse(key).outcome for key in CASES if CASES[key][0]["family"] == family}
        assert {Outcome.OK, Outcome.MALFORMED, Outcome.TRUNCATED} <= found, family
