"""`deskrl smoke`: the whole loop on this machine, then a resume, an evaluation, and a verdict.

Two training processes: the first trains a few steps and leaves a checkpoint; the second starts from nothing
but that checkpoint, trains one step more and evaluates once. The verdict is read from what they wrote.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deskrl.training.files import CHECKPOINTS, LOG_FILE, LOGPROB_GAP, METRICS_FILE, RunFolderError, read_metrics
from deskrl.training.supervisor import TrainingProcess
from deskrl.training.view import Watched, failed_count, watch
from deskrl.trials.progress import TRIALS_FILE

MAX_GAP = 0.05


@dataclass(frozen=True)
class Check:
    """One line of the verdict."""

    name: str
    ok: bool
    detail: str


class SmokeError(RuntimeError):
    """A training process failed; `code` is its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def smoke(console: Console, run_dir: Path, model: str, engine: str, steps: int, overrides: list[str]) -> bool:
    """Run it; prints progress and a summary, returns whether every check holds. Raises SmokeError."""
    started = time.monotonic()
    base = [
        f"generator.desk.run_dir={run_dir}",
        f"generator.desk.model={model}",
        f"generator.desk.engine.kind={engine}",
        *overrides,
    ]
    first = _train(console, run_dir, "train", base, steps)
    before = _latest_checkpoint(run_dir)
    # eval_interval=1 with one step to go: one evaluation.
    second = _train(console, run_dir, "resume", [*base, "trainer.eval_interval=1"], steps + 1)
    checks = judge(run_dir, steps, before)
    console.print(_summary(run_dir, checks, [first, second], time.monotonic() - started))
    return all(check.ok for check in checks)


def _train(console: Console, run_dir: Path, title: str, overrides: list[str], steps: int) -> Watched:
    process = TrainingProcess("smoke-cpu", [*overrides, f"trainer.max_training_steps={steps}"], run_dir)
    try:
        seen = watch(process, console, title, steps)
    except RunFolderError as error:
        raise SmokeError(str(error), 2) from error
    if seen.code != 0:
        raise SmokeError(f"{process.error()}\n(the whole log: {process.log_path})", seen.code if seen.code > 0 else 1)
    return seen


def judge(run_dir: Path, steps: int, checkpoint_before: int | None) -> list[Check]:
    """The verdict on a finished smoke run of `steps` + 1 steps."""
    metrics = read_metrics(run_dir)
    trained = sorted(step for step, values in metrics.items() if "trainer/global_step" in values)
    after = _latest_checkpoint(run_dir)
    gap = metrics.get(steps + 1, {}).get(LOGPROB_GAP)
    score = metrics.get(steps + 1, {}).get("eval/all/avg_score")
    trials = [json.loads(line) for line in (run_dir / TRIALS_FILE).read_text().splitlines()]
    outcomes: dict[str, int] = {}
    for trial in trials:
        outcomes[trial["outcome"]] = outcomes.get(trial["outcome"], 0) + 1
    updates = [step for step, values in metrics.items() if values.get("policy/update_skipped") == 0]
    return [
        Check("every step trained once", trained == list(range(1, steps + 2)), f"steps {trained}"),
        Check("weights updated", bool(updates), f"in steps {updates}"),
        Check("checkpoint of the last step", checkpoint_before == steps, f"global_step_{checkpoint_before}"),
        Check("resumed and went on", after == steps + 1, f"global_step_{after}"),
        Check(
            "engine follows the trainer",
            gap is not None and gap <= MAX_GAP,
            "not measured" if gap is None else f"mean |logprob difference| {gap:.1e} (at most {MAX_GAP})",
        ),
        Check("evaluated once", score is not None, "-" if score is None else f"mean reward {score:.3f}"),
        Check("no trial failed", failed_count(outcomes) == 0, ", ".join(f"{v} {k}" for k, v in outcomes.items())),
    ]


def _latest_checkpoint(run_dir: Path) -> int | None:
    try:
        return int((run_dir / CHECKPOINTS / "latest_ckpt_global_step.txt").read_text())
    except (OSError, ValueError):
        return None


def _summary(run_dir: Path, checks: list[Check], runs: list[Watched], seconds: float) -> Table:
    metrics = read_metrics(run_dir)
    rewards = [f"{m['reward/avg_raw_reward']:.3f}" for _, m in sorted(metrics.items()) if "reward/avg_raw_reward" in m]
    table = Table(title="deskrl smoke", show_header=False, title_justify="left")
    for check in checks:
        table.add_row("[green]ok[/]" if check.ok else "[red]FAIL[/]", check.name, check.detail)
    table.add_section()
    table.add_row("", "reward by step", "  ".join(rewards))
    table.add_row("", "wall time", f"{seconds:.0f} s ({runs[0].seconds:.0f} train, {runs[1].seconds:.0f} resume)")
    table.add_row("", "peak memory", f"{max(run.peak_memory for run in runs) / 1e9:.1f} GB, all processes together")
    table.add_section()
    for name, place in (
        ("trials", "trials"),
        ("one line a trial", TRIALS_FILE),
        ("metrics", METRICS_FILE),
        ("checkpoints", CHECKPOINTS),
        ("configuration", "config.yaml"),
        ("log", LOG_FILE),
    ):
        table.add_row("", name, str(run_dir / place))
    table.add_row("", "grading", "offline judge: deterministic criteria, no LLM")
    return table
