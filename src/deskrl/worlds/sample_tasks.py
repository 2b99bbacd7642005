"""Tasks of the sample world, in the recipe's format, gradable without any judge model.

Model: `build_sample_tasks` writes each of `sample_questions.SAMPLE_TASKS` as a task directory, with the
stand-alone grader inside.

Invariant: a task directory is complete or absent, and the same code writes the same bytes.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from deskrl.grading import standalone
from deskrl.worlds.sample_questions import CORE_TOOLS, SAMPLE_TASKS, SampleTask

__all__ = ["CORE_TOOLS", "SAMPLE_TASKS", "SampleTask", "build_sample_tasks", "task_files"]

WORLD_ID = "world_deskrl_sample"
WORLD_SHORT_NAME = "sample-harlow-pike"

_TASK_TOML = """schema_version = "1.4"

[metadata]
category = "knowledge-work"
difficulty = "easy"

[agent]
timeout_sec = 300.0

[verifier]
timeout_sec = 60.0

[environment]
cpus = 1
memory_mb = 2048
"""
_DOCKERFILE = "# Not built: the real environment is the sample world, see deskrl.worlds.sample.\nFROM scratch\n"
_TEST_SH = """#!/bin/bash
# Grades the trial: /logs/verifier gets reward.json, or grading_error.json when it could not be graded.
exec "${DESKRL_PYTHON:-python3}" -I /tests/grade.py \\
    --trajectory /logs/agent/trajectory.json --verifiers /tests/verifiers.json \\
    --filesystem /filesystem --out /logs/verifier
"""


def build_sample_tasks(out: Path) -> list[Path]:
    """Write every sample task below `out`, each in a directory of its name; return these, sorted.

    A task that is there already is replaced. Raises `FileExistsError` for a directory that is no sample task.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    return sorted(_build(task, index, out) for index, task in enumerate(SAMPLE_TASKS, start=1))


def _build(task: SampleTask, index: int, out: Path) -> Path:
    target = out / task.slug
    files = task_files(task, index)
    if _same(target, files):
        return target
    if target.exists() and not _is_ours(target):
        raise FileExistsError(f"{target} exists and is not a sample task; give another path, or remove it")
    build = Path(tempfile.mkdtemp(prefix=f".{task.slug}.build-", dir=out))
    try:
        for name, text in files.items():
            path = build / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755 if name.endswith(".sh") else 0o644)
        build.chmod(0o755)
        shutil.rmtree(target, ignore_errors=True)
        build.rename(target)
    except OSError:
        # Another process may have put the same task there in the meantime.
        if not _same(target, files):
            raise
    finally:
        shutil.rmtree(build, ignore_errors=True)
    return target


def task_files(task: SampleTask, index: int) -> dict[str, str]:
    """Return the task's files: relative path to text."""
    task_id = f"task_sample_{index:02d}"
    archipelago = {
        "task_id": task_id,
        "task_name": f"SAMPLE_{index:02d}",
        "task_slug": task.slug,
        "world_id": WORLD_ID,
        "world_short_name": WORLD_SHORT_NAME,
        "ecr_image": "",
        "required_env_keys": [],
        "needs_snapshot": False,
    }
    gold = [{"gold_response": task.gold, "gold_response_type": "message_in_console"}]
    return {
        "instruction.md": task.question + "\n",
        "task.toml": _TASK_TOML,
        "archipelago.json": _json(archipelago),
        "environment/Dockerfile": _DOCKERFILE,
        "tests/test.sh": _TEST_SH,
        "tests/grade.py": Path(standalone.__file__).read_text(encoding="utf-8"),
        "tests/verifiers.json": _json(_verifiers(task, task_id)),
        "tests/golden_responses.json": _json(gold),
    }


def _verifiers(task: SampleTask, task_id: str) -> list[dict[str, Any]]:
    criteria = [(text, check, True) for text, check in task.facts]
    criteria.append((*task.about, False))
    criteria += [(form.criteria, {"kind": "regex", "pattern": form.pattern}, False) for form in task.forms]
    return [
        {
            "verifier_id": f"{task_id}_v{index}",
            "verifier_version": 1,
            "world_id": WORLD_ID,
            "task_id": task_id,
            "eval_config_id": "offline",
            "verifier_values": {
                "criteria": text,
                "is_primary_objective": primary,
                "expected_file_type": (
                    "Spreadsheets" if check["kind"] == "file_exists" else "Final Answer Only (No Files)"
                ),
                "offline": check,
            },
            "verifier_index": index,
            "verifier_dependencies": None,
        }
        for index, (text, check, primary) in enumerate(criteria)
    ]


def _same(target: Path, files: dict[str, str]) -> bool:
    try:
        return all((target / name).read_text(encoding="utf-8") == text for name, text in files.items())
    except (OSError, UnicodeDecodeError):
        return False


def _is_ours(target: Path) -> bool:
    try:
        document = json.loads((target / "archipelago.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and document.get("world_id") == WORLD_ID


def _json(document: Any) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
