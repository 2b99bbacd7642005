"""Every way to end has exactly one kind, and only what was really graded has a reward."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskrl.agent import errors as agent_errors
from deskrl.agent.loop import StopReason
from deskrl.sandbox import errors as sandbox_errors
from deskrl.trials.outcome import RULES, Outcome, OutcomeKind, RewardRule, outcome_of, reward_of


def test_every_kind_has_a_rule() -> None:
    assert set(RULES) == set(OutcomeKind)


@pytest.mark.parametrize("reason", list(StopReason))
def test_every_stop_reason_of_the_agent_is_a_kind(reason: StopReason) -> None:
    assert outcome_of(reason.value, None, graded=True).kind.value == reason.value


@pytest.mark.parametrize("module", [agent_errors, sandbox_errors])
def test_our_own_exceptions_are_all_known(module: object) -> None:
    names = [name for name, kind in inspect.getmembers(module, inspect.isclass) if issubclass(kind, Exception)]
    own = [name for name in names if name not in ("ContextOverflowError",)]  # the loop turns that into a stop reason
    assert own
    for name in own:
        assert outcome_of(None, (name, ""), graded=False).kind is not OutcomeKind.UNEXPECTED, name


def test_the_exceptions_of_tokens_and_model_files_are_known() -> None:
    from deskrl.agent.model_files import ModelFilesError
    from deskrl.tokens import RendererError, TokenLedgerError
    from deskrl.tokens.chat import ChatTemplateError

    for kind in (ModelFilesError, RendererError, TokenLedgerError, ChatTemplateError):
        assert outcome_of(None, (kind.__name__, ""), graded=False).kind is not OutcomeKind.UNEXPECTED


def test_harbors_exceptions_that_end_a_trial_are_known() -> None:
    from harbor.trial import errors as trial_errors
    from harbor.verifier import verifier

    for module in (trial_errors, verifier):
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, Exception) and kind.__module__ == module.__name__:
                assert outcome_of(None, (name, ""), graded=False).kind is not OutcomeKind.UNEXPECTED, name


@given(st.text(), st.text(), st.booleans(), st.one_of(st.none(), st.text()))
def test_unforeseen_exceptions_are_errors_without_reward(name: str, message: str, graded: bool, stop: str) -> None:
    outcome = outcome_of(stop, ("X" + name, message), graded)
    assert outcome.kind is OutcomeKind.UNEXPECTED
    assert outcome.rule.error
    assert reward_of(outcome, 1.0) is None


@given(st.sampled_from(list(OutcomeKind)), st.one_of(st.none(), st.floats(0, 1)), st.booleans())
def test_no_failure_ever_has_a_reward(kind: OutcomeKind, graded: float | None, truncated: bool) -> None:
    reward = reward_of(Outcome(kind), graded, grade_truncated=truncated)
    if RULES[kind].reward is RewardRule.NONE:
        assert reward is None
    elif RULES[kind].reward is RewardRule.GRADED:
        assert reward == graded
    else:
        assert reward == (graded if truncated else 0.0)


def test_a_missing_reward_is_a_grading_failure_and_not_zero() -> None:
    outcome = outcome_of("answer", None, graded=False)
    assert outcome.kind is OutcomeKind.GRADING_FAILED
    assert reward_of(outcome, None) is None


def test_a_length_cap_earns_nothing_by_default() -> None:
    assert reward_of(Outcome(OutcomeKind.LENGTH), 0.75) == 0.0
    assert reward_of(Outcome(OutcomeKind.CONTEXT_LENGTH), 0.75) == 0.0
    assert reward_of(Outcome(OutcomeKind.LENGTH), 0.75, grade_truncated=True) == 0.75
