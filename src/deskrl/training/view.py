"""Watching a training process: a live line in a terminal, one line an event otherwise.

Reads the run folder only; the training process does not know who watches.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from deskrl.training.supervisor import TrainingProcess, memory_of, read_progress
from deskrl.trials.outcome import RULES, OutcomeKind

_WINDOW_S = 30.0
_MEMORY_EVERY_S = 2.0
_LINE_EVERY_S = 15.0


@dataclass
class Watched:
    """What was seen of a run: its exit code, wall time in seconds, peak memory in bytes, last counters."""

    code: int
    seconds: float
    peak_memory: int
    progress: dict[str, Any]


def failed_count(outcomes: dict[str, int]) -> int:
    """How many of these trials failed: no fault of the model, or a timeout."""
    kinds = {kind.value for kind, rule in RULES.items() if rule.error} | {OutcomeKind.TIMEOUT.value}
    return sum(count for kind, count in outcomes.items() if kind in kinds)


def watch(process: TrainingProcess, console: Console, title: str, total_steps: int | None) -> Watched:
    """Start a process, follow it to its end and clean up after it.

    Raises RunFolderError when it cannot start. Ctrl-C stops it; KeyboardInterrupt is raised once nothing of
    it is left. Call it from the main thread.
    """
    with _noted_interrupts() as interrupts:
        try:
            process.start()
            seen = _follow(process, console, title, total_steps, interrupts)
            if interrupts:
                console.print(f"[yellow]stopping {title} ...[/] (cleaning up sandboxes and processes)")
        finally:
            code = process.finish()
    if interrupts:
        raise KeyboardInterrupt
    seen.code = code
    seen.progress = read_progress(process.run_dir) or seen.progress
    return seen


@contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """Yields a list that Ctrl-C appends to, in place of an exception that could cut a clean-up short."""
    seen: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, previous)


def _follow(
    process: TrainingProcess, console: Console, title: str, total_steps: int | None, interrupts: list[int]
) -> Watched:
    started = time.monotonic()
    peak, memory_at = 0, 0.0
    speed: deque[tuple[float, int]] = deque()
    progress: dict[str, Any] = {}
    last_line, line_at = "", 0.0
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        while process.poll() is None and not interrupts:
            now = time.monotonic()
            if now - memory_at > _MEMORY_EVERY_S:
                peak, memory_at = max(peak, memory_of(process.run_id)), now
            progress = read_progress(process.run_dir) or progress
            tokens = int(progress.get("tokens") or 0)
            speed.append((now, tokens))
            while speed[0][0] < now - _WINDOW_S:
                speed.popleft()
            rate = (tokens - speed[0][1]) / max(now - speed[0][0], 1.0)
            if console.is_terminal:
                live.update(_table(title, progress, total_steps, rate, now - started))
            else:
                line = f"{title}: {progress.get('phase') or 'starting'}, step {_step(progress, total_steps)}"
                if line != last_line or now - line_at > _LINE_EVERY_S:
                    console.print(f"{line}, {_rest(progress, rate, now - started)}", highlight=False)
                    last_line, line_at = line, now
            time.sleep(0.2)
    return Watched(0, time.monotonic() - started, peak, progress)


def _counts(progress: dict[str, Any]) -> tuple[int, int, int]:
    outcomes = progress.get("outcomes") or {}
    failed = failed_count(outcomes)
    return int(progress.get("running") or 0), sum(outcomes.values()) - failed, failed


def _step(progress: dict[str, Any], total: int | None) -> str:
    step = progress.get("step")
    return f"{step if step is not None else '-'}/{total if total is not None else '?'}"


def _table(title: str, progress: dict[str, Any], total: int | None, rate: float, seconds: float) -> Table:
    running, done, failed = _counts(progress)
    reward = progress.get("mean_reward")
    table = Table.grid(padding=(0, 2))
    table.add_row(
        f"[bold cyan]{title}[/]",
        str(progress.get("phase") or "starting"),
        f"step [bold]{_step(progress, total)}[/]",
        f"trials {running} running, [green]{done} done[/], " + (f"[red]{failed} failed[/]" if failed else "0 failed"),
        f"reward {'-' if reward is None else format(reward, '.3f')}",
        f"{rate:.0f} tok/s",
        f"{seconds:.0f} s",
    )
    return table


def _rest(progress: dict[str, Any], rate: float, seconds: float) -> str:
    running, done, failed = _counts(progress)
    reward = progress.get("mean_reward")
    return (
        f"trials {running} running, {done} done, {failed} failed, "
        f"reward {'-' if reward is None else format(reward, '.3f')}, {rate:.0f} tok/s, {seconds:.0f} s"
    )
