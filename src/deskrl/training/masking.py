"""Which trajectories of a batch train, and with what reward, given how their trials ended.

Rules (the recipe's): an error masks its whole group; at least `timeout_threshold` timeouts mask the group,
fewer only themselves; a trajectory cut at a cap trains (overlong filtering masks the context overflows).

Invariant: a trajectory without a reward of its own never enters its group's baseline. It gets the mean of
its group's rewards, which leaves the mean as it was; its own tokens are masked anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deskrl.trials.outcome import OutcomeKind
from deskrl.trials.report import TrialReport

TIMEOUT_THRESHOLD = 2


@dataclass(frozen=True)
class Verdict:
    """What becomes of one trajectory. `reason` says why it is masked; empty when it trains."""

    reward: float
    reason: str

    @property
    def trained(self) -> bool:
        """Whether its sampled tokens keep their mask."""
        return not self.reason


def judge_group(
    reports: Sequence[TrialReport],
    *,
    timeout_threshold: int = TIMEOUT_THRESHOLD,
    overlong_filtering: bool = False,
) -> list[Verdict]:
    """The verdicts on all trajectories of one group (the samples of one prompt), in their order."""
    kinds = [report.outcome.kind for report in reports]
    errors = sorted({kind.value for kind, report in zip(kinds, reports, strict=True) if report.outcome.rule.error})
    timeouts = kinds.count(OutcomeKind.TIMEOUT)
    whole_group = ""
    if errors:
        whole_group = f"group: {', '.join(errors)}"
    elif timeouts >= timeout_threshold:
        whole_group = f"group: {timeouts} timeouts"
    rewards = [report.reward for report in reports if report.reward is not None]
    stand_in = sum(rewards) / len(rewards) if rewards else 0.0
    verdicts = []
    for kind, report in zip(kinds, reports, strict=True):
        reason = whole_group
        if not reason and report.reward is None:
            reason = kind.value
        if not reason and overlong_filtering and kind is OutcomeKind.CONTEXT_LENGTH:
            reason = "overlong"
        verdicts.append(Verdict(stand_in if report.reward is None else report.reward, reason))
    return verdicts
