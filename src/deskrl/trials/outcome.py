"""How a trial ended, typed: who failed, whether it is tried again, whether it trains, and with what reward.

Model: harbor records a failure as an exception's class name and the agent records a stop reason; `outcome_of`
maps the pair to one `OutcomeKind`, and `RULES` says what follows from it.

Invariants: every trial gets exactly one kind, also for exceptions nobody foresaw (`UNEXPECTED`). A reward
exists only where the rubric was really applied, or where the recipe fixes it at 0 for something that the
model itself did. A failure of judge, world, sandbox or engine never has a reward.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Party(StrEnum):
    """Who is answerable for an outcome."""

    MODEL = "model"
    WORLD = "world"
    SANDBOX = "sandbox"
    ENGINE = "engine"
    JUDGE = "judge"
    HARNESS = "harness"


class OutcomeKind(StrEnum):
    """How a trial ended."""

    ANSWER = "answer"
    MAX_TURNS = "max_turns"
    MALFORMED_TOOL_CALL = "malformed_tool_call"
    LENGTH = "length"
    CONTEXT_LENGTH = "context_length"
    TIMEOUT = "timeout"
    WORLD_NOT_READY = "world_not_ready"
    WORLD_LOST = "world_lost"
    SANDBOX_FAILED = "sandbox_failed"
    ENGINE_UNAVAILABLE = "engine_unavailable"
    ENGINE_PROTOCOL = "engine_protocol"
    GRADING_FAILED = "grading_failed"
    CONFIGURATION = "configuration"
    UNEXPECTED = "unexpected"


class RewardRule(StrEnum):
    """Where the reward comes from."""

    GRADED = "graded"
    ZERO = "zero"
    NONE = "none"


@dataclass(frozen=True)
class Rule:
    """What follows from an outcome. `error`: a failure that masks its whole group (see training.masking)."""

    party: Party
    reward: RewardRule
    retried: bool = False
    error: bool = False


RULES: dict[OutcomeKind, Rule] = {
    OutcomeKind.ANSWER: Rule(Party.MODEL, RewardRule.GRADED),
    OutcomeKind.MAX_TURNS: Rule(Party.MODEL, RewardRule.GRADED),
    OutcomeKind.MALFORMED_TOOL_CALL: Rule(Party.MODEL, RewardRule.GRADED),
    # The recipe's rule: running into a cap earns nothing, and the model trains on that.
    OutcomeKind.LENGTH: Rule(Party.MODEL, RewardRule.ZERO),
    OutcomeKind.CONTEXT_LENGTH: Rule(Party.MODEL, RewardRule.ZERO),
    # Slow model or slow machine: nobody can tell, so it has no reward and is masked by its own rule.
    OutcomeKind.TIMEOUT: Rule(Party.MODEL, RewardRule.NONE),
    OutcomeKind.WORLD_NOT_READY: Rule(Party.WORLD, RewardRule.NONE, retried=True, error=True),
    OutcomeKind.WORLD_LOST: Rule(Party.WORLD, RewardRule.NONE, retried=True, error=True),
    OutcomeKind.SANDBOX_FAILED: Rule(Party.SANDBOX, RewardRule.NONE, retried=True, error=True),
    OutcomeKind.ENGINE_UNAVAILABLE: Rule(Party.ENGINE, RewardRule.NONE, retried=True, error=True),
    OutcomeKind.ENGINE_PROTOCOL: Rule(Party.ENGINE, RewardRule.NONE, error=True),
    OutcomeKind.GRADING_FAILED: Rule(Party.JUDGE, RewardRule.NONE, retried=True, error=True),
    OutcomeKind.CONFIGURATION: Rule(Party.HARNESS, RewardRule.NONE, error=True),
    OutcomeKind.UNEXPECTED: Rule(Party.HARNESS, RewardRule.NONE, retried=True, error=True),
}

# Class names as harbor records them: its own, those of deskrl.agent.errors and deskrl.sandbox.errors.
_BY_EXCEPTION: dict[str, OutcomeKind] = {
    "AgentTimeoutError": OutcomeKind.TIMEOUT,
    "AgentSetupTimeoutError": OutcomeKind.WORLD_NOT_READY,
    "EnvironmentStartTimeoutError": OutcomeKind.SANDBOX_FAILED,
    "VerifierTimeoutError": OutcomeKind.GRADING_FAILED,
    "RewardFileNotFoundError": OutcomeKind.GRADING_FAILED,
    "RewardFileEmptyError": OutcomeKind.GRADING_FAILED,
    "VerifierOutputParseError": OutcomeKind.GRADING_FAILED,
    "AddTestsDirError": OutcomeKind.SANDBOX_FAILED,
    "DownloadVerifierDirError": OutcomeKind.SANDBOX_FAILED,
    "WorldNotReadyError": OutcomeKind.WORLD_NOT_READY,
    "WorldLostError": OutcomeKind.WORLD_LOST,
    "SandboxError": OutcomeKind.SANDBOX_FAILED,
    "SandboxUnavailable": OutcomeKind.CONFIGURATION,
    "EngineUnavailableError": OutcomeKind.ENGINE_UNAVAILABLE,
    "EngineProtocolError": OutcomeKind.ENGINE_PROTOCOL,
    "AgentConfigError": OutcomeKind.CONFIGURATION,
    "TaskFormatError": OutcomeKind.CONFIGURATION,
    "RendererError": OutcomeKind.CONFIGURATION,
    "ModelFilesError": OutcomeKind.CONFIGURATION,
    "ChatTemplateError": OutcomeKind.CONFIGURATION,
    "TokenLedgerError": OutcomeKind.ENGINE_PROTOCOL,
}

_BY_STOP_REASON: dict[str, OutcomeKind] = {
    kind.value: kind
    for kind in (
        OutcomeKind.ANSWER,
        OutcomeKind.MAX_TURNS,
        OutcomeKind.MALFORMED_TOOL_CALL,
        OutcomeKind.LENGTH,
        OutcomeKind.CONTEXT_LENGTH,
    )
}


@dataclass(frozen=True)
class Outcome:
    """A trial's end: its kind and, for a failure, the message that goes with it."""

    kind: OutcomeKind
    detail: str = ""

    @property
    def rule(self) -> Rule:
        """What follows from this kind."""
        return RULES[self.kind]


def outcome_of(stop_reason: str | None, exception: tuple[str, str] | None, graded: bool) -> Outcome:
    """The outcome of a trial.

    Args:
        stop_reason: the agent's own (`deskrl.agent.loop.StopReason`), None if it did not get that far.
        exception: class name and message of the first exception harbor recorded.
        graded: whether a reward was read.
    """
    if exception is not None:
        name, message = exception
        return Outcome(_BY_EXCEPTION.get(name, OutcomeKind.UNEXPECTED), f"{name}: {message}".strip())
    kind = _BY_STOP_REASON.get(stop_reason or "")
    if kind is None:
        return Outcome(OutcomeKind.UNEXPECTED, f"the agent reported the stop reason {stop_reason!r}")
    if not graded:
        return Outcome(OutcomeKind.GRADING_FAILED, "the verifier finished without a reward")
    return Outcome(kind)


def reward_of(outcome: Outcome, graded: float | None, *, grade_truncated: bool = False) -> float | None:
    """The reward that an outcome earns; None where there is none.

    `grade_truncated` applies the rubric to trajectories that hit a length cap too, instead of the recipe's 0:
    for small models that seldom end a turn by themselves.
    """
    rule = outcome.rule.reward
    if rule is RewardRule.NONE:
        return None
    truncated = outcome.kind in (OutcomeKind.LENGTH, OutcomeKind.CONTEXT_LENGTH)
    if rule is RewardRule.GRADED or (truncated and grade_truncated):
        return graded
    return 0.0
