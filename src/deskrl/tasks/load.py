"""Reading and checking task directories.

Model: `inspect_task` reads every file of a directory once and returns what it could parse along with
all problems; `lint_task` gives the problems, `load_task` the task or one error that lists them.

Invariants
- Every problem is reported, not only the first.
- task.toml is validated by harbor itself, then searched for keys that harbor would silently ignore.
- `${VAR}` in an env table must be the whole value and be set (or have a default): harbor finds out only
  after the trial's tests were uploaded.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from deskrl.tasks.problems import Problem, TaskFormatError, from_validation, unknown_keys
from deskrl.tasks.schema import Archipelago, GoldenResponse, Task, Timeouts, Verifier, bucket_of

__all__ = ["TaskFormatError", "bucket_of", "find_tasks", "lint_task", "load_task"]

_REQUIRED = (
    ("instruction.md", "write the prompt of the task into it"),
    ("task.toml", "write harbor's task configuration into it"),
    ("archipelago.json", "write the world's identity into it"),
    ("environment/Dockerfile", "add a placeholder; the world's image is the real environment"),
    ("tests/test.sh", "add the script that runs the grader"),
    ("tests/verifiers.json", "write the list of criteria into it"),
)
_ENV_REFERENCE = re.compile(r"\$\{([^}:]+)(:-[^}]*)?\}")


def find_tasks(directory: Path) -> list[Path]:
    """Return the task directories at or below `directory`, sorted: those holding a task.toml.

    Hidden directories (builds in progress) and what lies inside a task are not searched. Raises
    `FileNotFoundError` when there is no such directory.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory}: no such directory; give a folder of tasks")
    tasks: list[Path] = []
    for folder, folders, names in os.walk(directory):
        if "task.toml" in names:
            tasks.append(Path(folder))
            folders.clear()
        folders[:] = [name for name in folders if not name.startswith(".")]
    return sorted(tasks)


def lint_task(path: Path, environ: Mapping[str, str] | None = None) -> list[Problem]:
    """Return all problems of a task directory; empty when it is sound.

    `environ` is where `${VAR}` references are looked up (default: this process's environment).
    """
    return _inspect(path, os.environ if environ is None else environ)[1]


def load_task(path: Path, environ: Mapping[str, str] | None = None) -> Task:
    """Return the task at `path`. Raises `TaskFormatError` listing every error (warnings do not stop it)."""
    task, problems = _inspect(path, os.environ if environ is None else environ)
    if task is None or any(problem.severity == "error" for problem in problems):
        raise TaskFormatError(str(path), tuple(problems))
    return task


def _inspect(path: Path, environ: Mapping[str, str]) -> tuple[Task | None, list[Problem]]:
    problems: list[Problem] = []
    if not path.is_dir():
        rule = "is a file, not a directory" if path.exists() else "no such directory"
        return None, [Problem(str(path), "", rule, "give the path of a task directory")]
    if not any(path.iterdir()):
        return None, [Problem(str(path), "", "the directory is empty", "give the path of a task directory")]
    for name, fix in _REQUIRED:
        if not (path / name).is_file():
            problems.append(Problem(name, "", "the file is missing", fix))
    instruction = _text(path, "instruction.md", problems)
    if instruction is not None and not instruction.strip():
        problems.append(Problem("instruction.md", "", "the file is empty", "write the prompt into it"))
    archipelago = _archipelago(path, problems)
    verifiers = _verifiers(path, problems, archipelago.task_id if archipelago else None)
    timeouts = _task_toml(path, problems, environ)
    _golden_responses(path, problems)
    hints = _hints(path, problems)
    if instruction is None or archipelago is None or verifiers is None or timeouts is None:
        return None, problems
    task = Task(
        path=path.resolve(),
        task_id=archipelago.task_id,
        name=archipelago.task_name,
        slug=archipelago.task_slug,
        world_id=archipelago.world_id,
        world_short_name=archipelago.world_short_name,
        bucket=bucket_of(archipelago.world_short_name),
        ecr_image=archipelago.ecr_image,
        required_env_keys=tuple(archipelago.required_env_keys),
        needs_snapshot=archipelago.needs_snapshot,
        instruction=instruction,
        verifiers=verifiers,
        timeouts=timeouts,
        hints=hints,
    )
    return task, problems


def _text(path: Path, name: str, problems: list[Problem]) -> str | None:
    """Return a file's text, or None when absent (reported as missing elsewhere) or not UTF-8."""
    try:
        return (path / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        problems.append(Problem(name, "", f"cannot be read as UTF-8 text ({error})", "save it as UTF-8"))
        return None


def _json(path: Path, name: str, problems: list[Problem]) -> Any:
    text = _text(path, name, problems)
    if text is None:
        return None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        problems.append(Problem(name, "", f"is not JSON ({error})", "correct the syntax at that place"))
        return None
    if document is None:
        problems.append(Problem(name, "", "holds null", "write the document into it"))
    return document


def _model[M: BaseModel](
    name: str,
    model: type[M],
    data: Any,
    problems: list[Problem],
    prefix: str = "",
) -> M | None:
    problems.extend(unknown_keys(name, model, data, prefix=prefix, lenient=True))
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems.extend(from_validation(name, error, prefix))
        return None


def _archipelago(path: Path, problems: list[Problem]) -> Archipelago | None:
    document = _json(path, "archipelago.json", problems)
    return None if document is None else _model("archipelago.json", Archipelago, document, problems)


def _verifiers(path: Path, problems: list[Problem], task_id: str | None) -> tuple[Verifier, ...] | None:
    name = "tests/verifiers.json"
    document = _json(path, name, problems)
    if document is None:
        return None
    if not isinstance(document, list) or not document:
        problems.append(Problem(name, "", "must be a non-empty list", "list at least one criterion"))
        return None
    verifiers: list[Verifier] = []
    for index, entry in enumerate(document):
        verifier = _model(name, Verifier, entry, problems, f"[{index}]")
        if verifier is not None:
            verifiers.append(verifier)
            problems.extend(_same_task(name, index, verifier, task_id))
    seen: set[str] = set()
    for verifier in verifiers:
        if verifier.verifier_id in seen:
            problems.append(Problem(name, verifier.verifier_id, "the verifier_id occurs twice", "give each its own id"))
        seen.add(verifier.verifier_id)
    return tuple(verifiers) if len(verifiers) == len(document) else None


def _same_task(name: str, index: int, verifier: Verifier, task_id: str | None) -> Iterator[Problem]:
    if task_id is not None and verifier.task_id != task_id:
        yield Problem(
            name,
            f"[{index}].task_id",
            f"is {verifier.task_id!r}, but archipelago.json says {task_id!r}",
            "make both the same",
        )


def _golden_responses(path: Path, problems: list[Problem]) -> None:
    """Check the gold answers when present; they are not loaded into the task."""
    name = "tests/golden_responses.json"
    if not (path / name).is_file():
        return
    document = _json(path, name, problems)
    if document is None:
        return
    try:
        TypeAdapter(list[GoldenResponse]).validate_python(document)
    except ValidationError as error:
        problems.extend(from_validation(name, error))


def _hints(path: Path, problems: list[Problem]) -> tuple[str, ...]:
    name = "tests/hints.json"
    if not (path / name).is_file():
        return ()
    document = _json(path, name, problems)
    entries = document if isinstance(document, list) else [document]
    hints = [entry.get("hint") if isinstance(entry, dict) else None for entry in entries]
    if not all(isinstance(hint, str) for hint in hints):
        problems.append(Problem(name, "", 'must be a list of {"hint": text}', "correct its shape"))
        return ()
    return tuple(str(hint) for hint in hints)


def _task_toml(path: Path, problems: list[Problem], environ: Mapping[str, str]) -> Timeouts | None:
    from harbor.models.task.config import EnvironmentConfig, TaskConfig

    name = "task.toml"
    text = _text(path, name, problems)
    if text is None:
        return None
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        problems.append(Problem(name, "", f"is not TOML ({error})", "correct the syntax at that place"))
        return None
    # Spellings that harbor renames before validation.
    renamed = {TaskConfig: frozenset({"version"}), EnvironmentConfig: frozenset({"memory", "storage"})}
    problems.extend(unknown_keys(name, TaskConfig, data, extra=renamed))
    problems.extend(_env_references(name, data, environ))
    try:
        config = TaskConfig.model_validate_toml(text)
    except ValidationError as error:
        problems.extend(from_validation(name, error))
        return None
    except ValueError as error:
        problems.append(Problem(name, "", str(error), "correct the value"))
        return None
    limits = (("agent", config.agent.timeout_sec), ("verifier", config.verifier.timeout_sec))
    for section, seconds in limits:
        if seconds is not None and not 0 < seconds < float("inf"):
            problems.append(
                Problem(name, f"{section}.timeout_sec", "must be a positive number", "give seconds above 0")
            )
    return Timeouts(config.agent.timeout_sec, config.verifier.timeout_sec)


def _env_references(name: str, data: dict[str, Any], environ: Mapping[str, str]) -> Iterator[Problem]:
    for section in ("environment", "verifier", "solution"):
        table = data.get(section)
        env = table.get("env") if isinstance(table, dict) else None
        for key, value in env.items() if isinstance(env, dict) else ():
            if not isinstance(value, str) or "${" not in value:
                continue
            where = f"{section}.env.{key}"
            reference = _ENV_REFERENCE.fullmatch(value)
            if reference is None:
                yield Problem(
                    name,
                    where,
                    "a ${VAR} must be the whole value",
                    'write "${VAR}" or "${VAR:-default}" alone',
                )
            elif reference.group(2) is None and reference.group(1) not in environ:
                variable = reference.group(1)
                yield Problem(
                    name,
                    where,
                    f"the environment variable {variable} is not set",
                    f"export {variable}, or give a default: ${{{variable}:-...}}",
                )
