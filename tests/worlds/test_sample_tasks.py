"""The sample tasks: sound, gradable by their own grader, and worth learning from for very small models."""

from __future__ import annotations

import json
import os
import random
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deskrl.grading import standalone
from deskrl.tasks.load import find_tasks, lint_task, load_task
from deskrl.worlds.sample_tasks import SAMPLE_TASKS, SampleTask, build_sample_tasks

BY_SLUG = pytest.mark.parametrize("sample", SAMPLE_TASKS, ids=lambda sample: sample.slug)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {path.name: path for path in build_sample_tasks(tmp_path_factory.mktemp("tasks"))}


def gibberish(rng: random.Random, pieces: int) -> str:
    """Text of the kind that a model with random weights writes: mostly scraps of words, some symbols."""
    text = ""
    for _ in range(pieces):
        symbol = rng.random() < 0.02
        text += rng.choice(("", " ")) + (
            rng.choice('()[]{}`#"') if symbol else "".join(rng.choices(string.ascii_letters, k=rng.randint(2, 9)))
        )
    return text


def grade(task: Path, answer: str, filesystem: Path, out: Path) -> dict[str, float]:
    """Run the task's own grader as test.sh does, with other paths."""
    trajectory = out.with_suffix(".trajectory.json")
    trajectory.write_text(json.dumps({"messages": [{"role": "assistant", "content": answer}]}))
    command = [sys.executable, "-I", task / "tests/grade.py", "--trajectory", trajectory]
    command += ["--verifiers", task / "tests/verifiers.json", "--filesystem", filesystem, "--out", out]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rewards: dict[str, float] = json.loads((out / "reward.json").read_text())
    return rewards


def score(task: Path, answer: str, filesystem: Path) -> float:
    verifiers = json.loads((task / "tests/verifiers.json").read_text())
    trajectory = {"messages": [{"role": "assistant", "content": answer}]}
    return standalone.grade(trajectory, verifiers, str(filesystem))[0]["reward"]


@BY_SLUG
def test_sound_and_complete(tasks: dict[str, Path], sample: SampleTask) -> None:
    assert lint_task(tasks[sample.slug], {}) == []
    task = load_task(tasks[sample.slug], {})
    assert task.slug == sample.slug
    assert 2 <= len(task.verifiers) <= 4
    assert task.offline_gradable
    assert any(verifier.verifier_values.is_primary_objective for verifier in task.verifiers)
    # The tool prompt takes half of a small context.
    assert len(task.instruction) < 200


@BY_SLUG
def test_the_gold_answer_earns_everything_and_silence_nothing(
    tasks: dict[str, Path], sample: SampleTask, tmp_path: Path
) -> None:
    gold = json.loads((tasks[sample.slug] / "tests/golden_responses.json").read_text())[0]["gold_response"]
    filesystem = tmp_path / "filesystem"
    (filesystem / "deals").mkdir(parents=True)
    assert grade(tasks[sample.slug], "", filesystem, tmp_path / "empty")["reward"] == 0.0
    if sample.output_file:
        assert grade(tasks[sample.slug], gold, filesystem, tmp_path / "no_file")["reward"] < 1.0
        (filesystem / sample.output_file).write_bytes(b"x" * 5000)
    rewards = grade(tasks[sample.slug], gold, filesystem, tmp_path / "gold")
    assert rewards["reward"] == rewards["pass"] == 1.0


@BY_SLUG
def test_the_question_does_not_give_its_facts_away(tasks: dict[str, Path], sample: SampleTask, tmp_path: Path) -> None:
    verifiers = json.loads((tasks[sample.slug] / "tests/verifiers.json").read_text())
    trajectory = {"messages": [{"role": "assistant", "content": sample.question}]}
    _, report = standalone.grade(trajectory, verifiers, str(tmp_path))
    scores = [entry["score"] for entry in report["criteria"]]
    assert not any(scores[: len(sample.facts)])
    assert scores[len(sample.facts)] == 1.0, "naming what the question names must earn something"


@BY_SLUG
def test_random_text_earns_something_now_and_then(tasks: dict[str, Path], sample: SampleTask, tmp_path: Path) -> None:
    rng = random.Random(sample.slug)
    rewards = [score(tasks[sample.slug], gibberish(rng, rng.choice((20, 80))), tmp_path) for _ in range(64)]
    assert sum(reward > 0 for reward in rewards) > 6
    assert len(set(rewards)) > 1
    assert max(rewards) < 1.0


@pytest.mark.parametrize(
    "answer", ["a " * 10_000, " " * 20_000, "a" * 20_000, "a\n \t" * 4_000, "1debt " * 3_000 + "("]
)
def test_no_pattern_stalls_on_a_long_answer(answer: str) -> None:
    patterns = {
        check["pattern"]
        for sample in SAMPLE_TASKS
        for check in [
            *(check for _, check in sample.facts),
            sample.about[1],
            *({"pattern": f.pattern} for f in sample.forms),
        ]
        if "pattern" in check
    }
    for pattern in sorted(patterns):
        standalone.regex_search(pattern, answer)  # raises when it takes too long


def test_found_and_built_once(tasks: dict[str, Path]) -> None:
    folder = next(iter(tasks.values())).parent
    assert find_tasks(folder) == sorted(tasks.values())
    before = {path: path.stat().st_ino for path in folder.rglob("*")}
    assert build_sample_tasks(folder) == sorted(tasks.values())
    assert {path: path.stat().st_ino for path in folder.rglob("*")} == before


def test_ids_are_unique(tasks: dict[str, Path]) -> None:
    loaded: list[Any] = [load_task(path, {}) for path in tasks.values()]
    assert len({task.task_id for task in loaded}) == len({task.name for task in loaded}) == len(SAMPLE_TASKS)


def test_an_outdated_task_is_replaced_and_a_foreign_one_refused(tmp_path: Path) -> None:
    first, *_ = build_sample_tasks(tmp_path)
    (first / "instruction.md").write_text("old")
    build_sample_tasks(tmp_path)
    assert (first / "instruction.md").read_text() != "old"
    (first / "archipelago.json").write_text('{"world_id": "theirs"}')
    with pytest.raises(FileExistsError, match="is not a sample task"):
        build_sample_tasks(tmp_path)


def test_harbor_reads_them(tasks: dict[str, Path]) -> None:
    from harbor.models.task.task import Task

    for path in tasks.values():
        task = Task(path)
        assert task.config.agent.timeout_sec == 300.0
        assert task.config.verifier.timeout_sec == 60.0
        assert os.access(path / "tests/test.sh", os.X_OK)


def test_the_script_uses_the_sandbox_paths(tasks: dict[str, Path]) -> None:
    script = next(iter(tasks.values())) / "tests/test.sh"
    environ = {"PATH": os.environ["PATH"], "DESKRL_PYTHON": "/bin/echo"}
    shown = subprocess.run([script], env=environ, capture_output=True, text=True, check=True).stdout
    options = {"trajectory": "/logs/agent/trajectory.json", "verifiers": "/tests/verifiers.json"}
    options |= {"filesystem": "/filesystem", "out": "/logs/verifier"}
    assert shown.split() == ["-I", "/tests/grade.py"] + [w for k, v in options.items() for w in (f"--{k}", v)]
