"""A table of trial reports for the terminal. Failed trials are shown and counted apart, never averaged in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deskrl.trials.report import TrialReport


def print_reports(console: Console, reports: Sequence[TrialReport], folder: Path) -> int:
    """Prints the reports and their means; returns how many trials failed (have no reward)."""
    table = Table("task", "outcome", "reward", "criteria", "turns", "tools", "seconds")
    for report in reports:
        met = sum(value >= 1.0 for value in report.criteria.values())
        table.add_row(
            report.task_id if len(reports) == 1 or report.repetition == 0 else f"{report.task_id} #{report.repetition}",
            report.outcome.kind.value if report.reward is not None else f"[red]{report.outcome.kind.value}[/]",
            "-" if report.reward is None else f"{report.reward:.3f}",
            f"{met}/{len(report.criteria)}",
            str(report.turns),
            f"{report.tool_calls - report.tool_failures}/{report.tool_calls}",
            f"{report.seconds:.1f}",
        )
    console.print(table)
    rewards = [report.reward for report in reports if report.reward is not None]
    failed = [report for report in reports if report.reward is None]
    if rewards:
        passed = sum(reward >= 1.0 for reward in rewards) / len(rewards)
        console.print(
            f"mean reward {sum(rewards) / len(rewards):.3f}, all criteria met {passed:.1%}, "
            f"over {len(rewards)} graded trials (offline judge where the task says so)",
            highlight=False,
        )
    for report in failed:
        console.print(f"[red]failed[/] {report.name}: {escape(report.outcome.detail)}", highlight=False)
    console.print(f"trials: {folder / 'trials'}", highlight=False, soft_wrap=True)
    return len(failed)
