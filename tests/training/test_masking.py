"""The recipe's masking rules, and that no failure ever moves a baseline."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskrl.training.masking import judge_group
from deskrl.trials.outcome import RULES, Outcome, OutcomeKind, reward_of
from deskrl.trials.report import TrialReport

ERRORS = [kind for kind, rule in RULES.items() if rule.error]


def report(kind: OutcomeKind, graded: float | None = 0.5) -> TrialReport:
    outcome = Outcome(kind)
    return TrialReport(
        name="t", task_id="t", bucket="other", phase="train", step=1, repetition=0, attempt=0, outcome=outcome,
        reward=reward_of(outcome, graded), criteria={}, path=Path("/x"), seconds=1.0,
    )  # fmt: skip


ANSWER, TIMEOUT = OutcomeKind.ANSWER, OutcomeKind.TIMEOUT


@pytest.mark.parametrize("kind", ERRORS)
def test_one_error_masks_its_whole_group(kind: OutcomeKind) -> None:
    verdicts = judge_group([report(ANSWER), report(kind), report(ANSWER)])
    assert not any(v.trained for v in verdicts)
    assert all(kind.value in v.reason for v in verdicts)


def test_one_timeout_masks_itself_and_two_mask_the_group() -> None:
    assert [v.trained for v in judge_group([report(ANSWER), report(TIMEOUT), report(ANSWER)])] == [True, False, True]
    assert not any(v.trained for v in judge_group([report(ANSWER), report(TIMEOUT), report(TIMEOUT)]))
    three = judge_group([report(ANSWER), report(TIMEOUT), report(TIMEOUT)], timeout_threshold=3)
    assert [v.trained for v in three] == [True, False, False]


def test_caps_train_with_zero_unless_overlong_filtering_masks_them() -> None:
    kinds = [ANSWER, OutcomeKind.LENGTH, OutcomeKind.CONTEXT_LENGTH]
    assert [(v.trained, v.reward) for v in judge_group([report(k) for k in kinds])] == [
        (True, 0.5),
        (True, 0.0),
        (True, 0.0),
    ]
    assert [v.trained for v in judge_group([report(k) for k in kinds], overlong_filtering=True)] == [True, True, False]


@given(st.lists(st.tuples(st.sampled_from(list(OutcomeKind)), st.floats(0, 1)), min_size=1, max_size=16))
def test_a_missing_reward_leaves_the_groups_mean_as_it_is(ends: list[tuple[OutcomeKind, float]]) -> None:
    reports = [report(kind, graded) for kind, graded in ends]
    verdicts = judge_group(reports)
    assert len(verdicts) == len(reports)
    own = [r.reward for r in reports if r.reward is not None]
    if own:
        mean = sum(own) / len(own)
        assert sum(v.reward for v in verdicts) / len(verdicts) == pytest.approx(mean)
    for verdict, each in zip(verdicts, reports, strict=True):
        if each.reward is None:
            assert not verdict.trained
        else:
            assert verdict.reward == each.reward
