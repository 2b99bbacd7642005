"""The offline judge behind the protocol, and its agreement with the schema of tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from deskrl.grading.judge import JudgeFailure, JudgeRequest, OfflineJudge, Verdict, reward_of
from deskrl.grading.standalone import check_problem
from deskrl.tasks.schema import OfflineCheck


def request(answer: str, filesystem: Path | None = None, **values: Any) -> JudgeRequest:
    verifier = {"verifier_id": "v1", "verifier_values": {"criteria": "names the fee", **values}}
    return JudgeRequest(verifier, answer, filesystem=filesystem)


async def test_a_verdict() -> None:
    verdict = await OfflineJudge().judge(request("the FEE", offline={"kind": "contains", "text": "fee"}))
    assert isinstance(verdict, Verdict)
    assert (verdict.verifier_id, verdict.score, verdict.is_criteria_true) == ("v1", 1.0, True)


async def test_a_negative_criterion_keeps_the_raw_truth() -> None:
    check = {"kind": "contains", "text": "fee"}
    verdict = await OfflineJudge().judge(request("the fee", offline=check, negative_criteria=True))
    assert isinstance(verdict, Verdict)
    assert (verdict.score, verdict.is_criteria_true) == (0.0, True)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({}, "criterion_unjudgeable"),
        ({"offline": {"kind": "guess"}}, "verifiers_malformed"),
        ({"offline": {"kind": "file_exists", "path": "x"}}, "filesystem_missing"),
        ({"offline": {"kind": "regex", "pattern": "(a|a)*b"}}, "regex_timeout"),
    ],
)
async def test_what_cannot_be_judged_is_a_failure(values: dict[str, Any], kind: str) -> None:
    outcome = await OfflineJudge().judge(request("a" * 60, **values))
    assert isinstance(outcome, JudgeFailure)
    assert outcome.kind == kind


async def test_files_are_seen(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("1")
    verdict = await OfflineJudge().judge(request("", tmp_path, offline={"kind": "file_exists", "path": "x"}))
    assert isinstance(verdict, Verdict)
    assert verdict.score == 1.0


async def test_no_verdicts_give_no_reward() -> None:
    with pytest.raises(ValueError, match="at least one judged criterion"):
        reward_of([])
    verdict = await OfflineJudge().judge(request("fee", offline={"kind": "contains", "text": "fee"}))
    assert isinstance(verdict, Verdict)
    assert reward_of([verdict]) == {"reward": 1.0, "pass": 1.0, "criterion/v1": 1.0}


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.floats(),
    st.sampled_from(["", "x", "(", "a{99999999999}", "../x", "a/b"]),
    st.just([]),
)
FIELDS = {
    "contains": ("text", "case_sensitive"),
    "regex": ("pattern",),
    "number": ("value", "tolerance"),
    "file_exists": ("path", "min_bytes"),
    "guess": ("text",),
}


@st.composite
def checks(draw: st.DrawFn) -> dict[str, Any]:
    """Checks that are nearly right: mostly their kind's own keys, with values of any type."""
    kind = draw(st.sampled_from(sorted(FIELDS)))
    keys = draw(st.sets(st.sampled_from([*FIELDS[kind], "extra"])))
    return {"kind": kind, **{key: draw(VALUES) for key in sorted(keys)}}


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(checks())
def test_the_grader_and_the_schema_accept_the_same_checks(check: dict[str, Any]) -> None:
    try:
        TypeAdapter(OfflineCheck).validate_python(check)
        accepted = True
    except ValidationError:
        accepted = False
    assert accepted == (check_problem(check) == ""), check_problem(check)
