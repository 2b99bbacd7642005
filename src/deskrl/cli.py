"""The command line: parsing and printing only. Every command imports what it needs when it runs."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="RL training and evaluation of knowledge-work agents on SkyRL and harbor.",
)
tasks_app = typer.Typer(no_args_is_help=True, help="Make, check and look at task directories.")
trial_app = typer.Typer(no_args_is_help=True, help="Run single trials.")
app.add_typer(tasks_app, name="tasks")
app.add_typer(trial_app, name="trial")
doctor_app = typer.Typer(invoke_without_command=True, help="Check this machine, or a model.")
app.add_typer(doctor_app, name="doctor")

USER_ERROR = 2


def _console() -> Console:
    from rich.console import Console

    return Console()


def _fail(message: object, code: int = USER_ERROR) -> NoReturn:
    from rich.console import Console
    from rich.markup import escape

    Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(message))}", highlight=False)
    raise typer.Exit(code)


def _need_training() -> None:
    import importlib.util

    if importlib.util.find_spec("skyrl") is None:
        _fail("training needs the extra `train`: uv sync --extra train (or pip install 'deskrl[train]')")


@app.command()
def smoke(
    model: Annotated[str, typer.Option(help="smollm2, tiny (fastest), a model directory or a hub id")] = "smollm2",
    engine: Annotated[str, typer.Option(help="embedded, or vllm-cpu for the real vLLM")] = "embedded",
    steps: Annotated[int, typer.Option(min=1, help="training steps before the checkpoint")] = 2,
    run_dir: Annotated[Path | None, typer.Option(help="where the run goes; default runs/smoke-TIME")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value for the preset smoke-cpu")] = None,
) -> None:
    """Prove the whole loop on this machine: trials, updates, weight sync, checkpoint, resume, evaluation."""
    _need_training()
    if engine not in ("embedded", "vllm-cpu"):
        _fail(f"--engine {engine!r}: use embedded or vllm-cpu")
    from deskrl.training.files import CHECKPOINTS
    from deskrl.training.smoke import SmokeError
    from deskrl.training.smoke import smoke as run_smoke

    folder = (run_dir or Path("runs") / f"smoke-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    if (folder / CHECKPOINTS).exists():
        _fail(f"{folder} already holds a run: choose another --run-dir, or remove it")
    try:
        passed = run_smoke(_console(), folder, model, engine, steps, list(overrides or []))
    except SmokeError as error:
        _fail(error, error.code)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    raise typer.Exit(0 if passed else 1)


@app.command()
def train(
    preset: Annotated[str, typer.Argument(help="a preset's name, or a YAML file")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="resolve and check everything, then stop")] = False,
) -> None:
    """Train with a preset; resumes from the run folder's last checkpoint if there is one."""
    _need_training()
    code = _run_preset(preset, list(overrides or []), *(["--dry-run"] if dry_run else []))
    raise typer.Exit(code)


def _run_preset(preset: str, overrides: list[str], *flags: str) -> int:
    """Start a training process and watch it; returns its exit code."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from deskrl.training.files import RunFolderError
    from deskrl.training.presets import PresetError, preset_path
    from deskrl.training.supervisor import TrainingProcess
    from deskrl.training.view import watch

    try:
        path = preset_path(preset)
        merged = OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_dotlist(overrides))
        run_dir = Path(OmegaConf.select(merged, "generator.desk.run_dir", default="runs/default")).absolute()
        steps = OmegaConf.select(merged, "trainer.max_training_steps")
    except (PresetError, OmegaConfBaseException, YAMLError, ValueError) as error:
        _fail(f"{preset}: {' '.join(str(error).split())}")
    process = TrainingProcess(str(path), overrides, run_dir, *flags)
    try:
        seen = watch(process, _console(), path.stem, steps)
    except RunFolderError as error:
        _fail(error)
    except KeyboardInterrupt:
        return 130
    if seen.code != 0:
        _fail(f"{process.error()}\n(the whole log: {process.log_path})", seen.code if seen.code > 0 else 1)
    _console().print(f"run folder: {run_dir}", highlight=False)
    return 0


@app.command(name="eval")
def evaluate(
    tasks: Annotated[str, typer.Option(help="`sample`, a task directory, or a folder of them")] = "sample",
    model: Annotated[str, typer.Option(help="model name at --base-url; or smollm2, tiny, a model directory")] = "",
    base_url: Annotated[str, typer.Option(help="an OpenAI-compatible chat endpoint (without /chat/completions)")] = "",
    api_key_env: Annotated[str, typer.Option(help="environment variable that holds the API key")] = "",
    worlds: Annotated[Path | None, typer.Option(help="folder of worlds named by world id")] = None,
    samples: Annotated[int, typer.Option(min=1, help="trials for each task")] = 1,
    concurrency: Annotated[int, typer.Option(min=1)] = 8,
    out: Annotated[Path | None, typer.Option(help="where trials go; default runs/eval-TIME")] = None,
    patience: Annotated[float, typer.Option(min=0, help="seconds that an unreachable model is retried")] = 60.0,
    preset: Annotated[str, typer.Option(help="evaluate a training preset's model and eval_tasks with SkyRL")] = "",
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value for --preset")] = None,
) -> None:
    """Evaluate a model on tasks: over an API (no torch needed), a local one, or as a training preset says."""
    if preset:
        _need_training()
        raise typer.Exit(_run_preset(preset, list(overrides or []), "--evaluate"))
    if overrides:
        _fail(f"{overrides[0]!r}: key=value overrides go with --preset")
    _evaluate(tasks, model, base_url, api_key_env, worlds, samples, concurrency, out, patience)


@trial_app.command(name="run")
def trial_run(
    task: Annotated[Path, typer.Argument(help="a task directory")],
    model: Annotated[str, typer.Option(help="model name at --base-url; or smollm2, tiny, a model directory")] = "",
    base_url: Annotated[str, typer.Option(help="an OpenAI-compatible chat endpoint (without /chat/completions)")] = "",
    api_key_env: Annotated[str, typer.Option(help="environment variable that holds the API key")] = "",
    worlds: Annotated[Path | None, typer.Option(help="folder of worlds named by world id")] = None,
    out: Annotated[Path | None, typer.Option(help="where the trial goes; default runs/trial-TIME")] = None,
    patience: Annotated[float, typer.Option(min=0, help="seconds that an unreachable model is retried")] = 60.0,
) -> None:
    """Run one trial of one task and show what happened."""
    _evaluate(str(task), model, base_url, api_key_env, worlds, 1, 1, out, patience, kind="trial")


@trial_app.command(name="show")
def trial_show(
    trial: Annotated[Path, typer.Argument(help="a finished trial's folder (with agent/tokens.npz)")],
    html: Annotated[Path | None, typer.Option(help="write a page to this file instead")] = None,
    boundaries: Annotated[bool, typer.Option("--boundaries", help="mark each token and line end")] = False,
    model_dir: Annotated[str, typer.Option(help="the tokenizer's folder; default: the one the trial used")] = "",
) -> None:
    """Show a trial's tokens by where they came from: template, sampled, tool, injected."""
    import json

    from deskrl.agent.model_files import ModelFilesError, load_chat_tokenizer
    from deskrl.tokens.ledger import TokenLedger, TokenLedgerError
    from deskrl.tokens.show import html_page, show, show_html

    tokens, config = trial / "agent" / "tokens.npz", trial / "config.json"
    try:
        ledger = TokenLedger.from_bytes(tokens.read_bytes())
        folder = model_dir or json.loads(config.read_text())["agent"]["kwargs"]["model_dir"]
        tokenizer = load_chat_tokenizer(str(folder))
        if html is not None:
            page = html_page(trial.resolve().name, show_html(ledger, tokenizer, boundaries=boundaries))
            html.write_text(page, encoding="utf-8")
    except FileNotFoundError as error:
        _fail(f"{error.filename}: not there; is {trial} the folder of a trial that had a token policy?")
    except TokenLedgerError as error:
        _fail(f"{tokens}: {error}")
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ModelFilesError):
            _fail(f"{error}; say where the tokenizer is with --model-dir")
        _fail(f"{config} names no agent.kwargs.model_dir ({error!r}): use --model-dir")
    except OSError as error:
        _fail(error)
    if html is None:
        _console().print(show(ledger, tokenizer, boundaries=boundaries), soft_wrap=True)
    where = f": {html}" if html else ""
    _console().print(f"{len(ledger)} tokens, {ledger.sampled} sampled, {ledger.turns} turns{where}", highlight=False)


def _evaluate(
    tasks: str,
    model: str,
    base_url: str,
    api_key_env: str,
    worlds: Path | None,
    samples: int,
    concurrency: int,
    out: Path | None,
    patience: float,
    kind: str = "eval",
) -> None:
    from deskrl.evaluation.run import EvaluationError, EvaluationRequest, run_evaluation

    if not base_url:
        if not model:
            _fail("say which model: --base-url and --model for an API, or --model smollm2 for a local one")
        _need_training()
    folder = (out or Path("runs") / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    request = EvaluationRequest(
        tasks, model, base_url, api_key_env or None, worlds, samples, concurrency, folder, patience
    )
    try:
        reports = run_evaluation(request, _console())
    except EvaluationError as error:
        _fail(error)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    from deskrl.evaluation.table import print_reports

    failed = print_reports(_console(), reports, folder)
    raise typer.Exit(1 if failed else 0)


@tasks_app.command(name="list")
def tasks_list(folder: Annotated[Path, typer.Argument(help="a folder of tasks")]) -> None:
    """List the tasks at or below a folder."""
    from rich.table import Table

    from deskrl.tasks.load import load_task
    from deskrl.tasks.problems import TaskFormatError

    table = Table("task", "bucket", "world", "criteria", "path")
    bad = 0
    for path in _found(folder):
        try:
            task = load_task(path)
        except TaskFormatError as error:
            bad += 1
            table.add_row("[red]unusable[/]", "", "", "", f"{path}: {error.file}: {error.rule}")
            continue
        table.add_row(task.task_id, task.bucket, task.world_short_name, str(len(task.verifiers)), str(path))
    _console().print(table)
    raise typer.Exit(USER_ERROR if bad else 0)


@tasks_app.command(name="lint")
def tasks_lint(folder: Annotated[Path, typer.Argument(help="a task directory, or a folder of them")]) -> None:
    """Check tasks; exit code 2 if one cannot be used."""
    from deskrl.tasks.load import lint_task

    console, bad = _console(), 0
    found = _found(folder)
    for path in found:
        for problem in lint_task(path):
            bad += problem.severity == "error"
            console.print(f"{path}: {problem}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"{len(found)} tasks, {bad} errors")
    raise typer.Exit(USER_ERROR if bad else 0)


@tasks_app.command(name="show")
def tasks_show(path: Annotated[Path, typer.Argument(help="a task directory")]) -> None:
    """Show a task: prompt, world, criteria."""
    from rich.markup import escape
    from rich.panel import Panel

    from deskrl.tasks.load import load_task
    from deskrl.tasks.problems import TaskFormatError

    try:
        task = load_task(path)
    except TaskFormatError as error:
        _fail(error)
    console = _console()
    console.print(Panel(escape(task.instruction), title=f"{task.name} ({task.bucket}, world {task.world_short_name})"))
    for verifier in task.verifiers:
        console.print(f"- {verifier.verifier_values.criteria}", highlight=False, markup=False)


@tasks_app.command(name="sample")
def tasks_sample(out: Annotated[Path, typer.Argument(help="folder to make; gets tasks/ and worlds/")]) -> None:
    """Write the sample world and its tasks into a folder, to look at or to change."""
    from deskrl.worlds.sample_set import build_sample_set

    try:
        tasks, worlds = build_sample_set(out)
    except (OSError, ValueError) as error:
        _fail(error)
    _console().print(f"tasks: {tasks}\nworlds: {worlds}", highlight=False)


def _found(folder: Path) -> list[Path]:
    from deskrl.tasks.load import find_tasks

    try:
        found = find_tasks(folder)
    except FileNotFoundError as error:
        _fail(error)
    if not found:
        _fail(f"{folder} holds no task (no task.toml at or below it)")
    return found


@doctor_app.callback()
def doctor(context: typer.Context) -> None:
    """Check what this machine can do: sandboxes, training, GPU, disk. `doctor tokens MODEL` checks a model."""
    if context.invoked_subcommand is not None:
        return
    from deskrl.doctor import check_all

    _report((check.name, check.ok, check.detail, check.fix) for check in check_all())


@doctor_app.command(name="tokens")
def doctor_tokens(
    model: Annotated[str, typer.Argument(help="smollm2, tiny, or a model directory")],
    parser: Annotated[str, typer.Option(help="tool-call parser; default: what the template asks for")] = "",
) -> None:
    """Check that a model's template, tokenizer, parser and renderer fit together; exit code 2 if not."""
    from deskrl.agent.model_check import check_model_dir

    folder = Path(model).expanduser()
    if not folder.is_dir():
        _need_training()
        from deskrl.training.models import ModelError, prepare_model

        try:
            folder = prepare_model(model)
        except ModelError as error:
            _fail(error)
        if not folder.is_dir():
            _fail(f"{model}: no such directory; download the model first and give its folder")
    _report((found.name, found.ok, found.detail, found.fix) for found in check_model_dir(folder, parser or None))


def _report(findings: Iterable[tuple[str, bool, str, str]]) -> NoReturn:
    """Print findings (name, ok, detail, what to do) and exit, with 2 if one is not ok."""
    from rich.markup import escape
    from rich.table import Column, Table

    table = Table("", "check", Column("found", overflow="fold"), Column("what to do", overflow="fold"))
    bad = 0
    for name, ok, detail, fix in findings:
        bad += not ok
        table.add_row("[green]ok[/]" if ok else "[red]FAIL[/]", *map(escape, (name, detail, fix)))
    _console().print(table)
    raise typer.Exit(USER_ERROR if bad else 0)


def main() -> None:
    """Entry point of the `deskrl` command. SIGTERM ends it as tidily as Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
