"""The offline checks: which texts hold which numbers, patterns and words."""

from __future__ import annotations

import re
import string
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deskrl.grading.standalone import GradingFailure, check_problem, numbers_in, regex_search, rewards_of, run_check

# No limits on time: the machine may be busy.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def holds(check: dict[str, object], answer: str) -> bool:
    assert check_problem(check) == ""
    return run_check(check, answer, "").holds


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,250,000", 1_250_000),
        ("$1.25 million", 1_250_000),
        ("EUR 1.25m", 1_250_000),
        ("1.25mn", 1_250_000),
        ("12%", 0.12),
        ("12%", 12),
        ("12 percent", 0.12),
        ("(500)", -500),
        ("(500)", 500),
        ("-3.5", -3.5),
        ("−3.5", -3.5),
        ("-$20", -20),
        ("$-20", -20),
        ("8.1x EBITDA", 8.1),
        ("62 hours.", 62),
        ("It is 45.", 45),
        ("1e3", 1000),
        (".5", 0.5),
        ("£2bn", 2e9),
        ("9,660k", 9_660_000),
        ("2023-2025", 2025),
    ],
)
def test_numbers_are_read_as_people_write_them(text: str, value: float) -> None:
    assert any(abs(number - value) < 1e-9 for number in numbers_in(text)), numbers_in(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("Q3", 3), ("abc", 0), ("1,25", 1.25), ("12345", 1234), ("x_7", 7), ("", 0), ("1,250,000", 250)],
)
def test_what_is_not_that_number(text: str, value: float) -> None:
    assert value not in numbers_in(text)


@PATIENT
@given(st.integers(-(10**12), 10**12))
def test_an_integer_is_found_with_and_without_separators(value: int) -> None:
    check = {"kind": "number", "value": value}
    assert holds(check, f"The result is {value}.")
    assert holds(check, f"The result is {value:,} in all")


@PATIENT
@given(st.decimals(min_value=0, max_value=10**6, places=2), st.floats(0, 100))
def test_tolerance_is_absolute_and_inclusive(value: object, tolerance: float) -> None:
    number = float(str(value))
    assert holds({"kind": "number", "value": number + tolerance, "tolerance": tolerance}, f"about {value}")
    assert not holds({"kind": "number", "value": number + 2 * tolerance + 1, "tolerance": tolerance}, f"about {value}")


@PATIENT
@given(st.text())
def test_any_text_can_be_searched_for_numbers(text: str) -> None:
    assert all(isinstance(number, float) for number in numbers_in(text))


@PATIENT
@given(st.text(string.ascii_letters, min_size=1), st.text(), st.text())
def test_contains_ignores_case_unless_told(needle: str, before: str, after: str) -> None:
    answer = before + needle.swapcase() + after
    assert holds({"kind": "contains", "text": needle}, answer)
    exact = {"kind": "contains", "text": needle, "case_sensitive": True}
    assert holds(exact, answer) == (needle in answer)


@PATIENT
@given(st.text(min_size=1, max_size=20), st.text(max_size=60))
def test_a_pattern_is_searched_as_python_does(literal: str, answer: str) -> None:
    pattern = re.escape(literal)
    assert holds({"kind": "regex", "pattern": pattern}, answer) == (literal in answer)


def test_a_pattern_sees_only_the_head_of_a_huge_answer() -> None:
    check = {"kind": "regex", "pattern": "needle"}
    assert holds(check, "needle" + "x" * 30_000)
    assert not holds(check, "x" * 30_000 + "needle")


def test_the_deadline_also_holds_outside_the_main_thread() -> None:
    outcome: list[object] = []

    def search() -> None:
        outcome.append(regex_search("b+c", "abbc"))
        try:
            regex_search("(a|a)*b", "a" * 60, 0.2)
        except GradingFailure as failure:
            outcome.append(failure.kind)

    thread = threading.Thread(target=search)
    thread.start()
    thread.join()
    assert outcome == [True, "regex_timeout"]


@PATIENT
@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=10))
def test_the_reward_is_the_mean_and_passing_means_all(scores: list[float]) -> None:
    rewards = rewards_of([{"verifier_id": str(i), "score": score} for i, score in enumerate(scores)])
    assert rewards["reward"] == pytest.approx(sum(scores) / len(scores))
    assert rewards["pass"] == float(all(scores))
    assert len(rewards) == 2 + len(scores)
