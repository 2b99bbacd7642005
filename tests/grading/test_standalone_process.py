"""The grader as a task runs it: a process of its own, whose files are the only thing that counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deskrl.grading import standalone


class Trial:
    """The directories that harbor gives a grader."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.trajectory = root / "trajectory.json"
        self.verifiers = root / "verifiers.json"
        self.filesystem = root / "filesystem"
        self.out = root / "verifier"
        self.filesystem.mkdir()
        self.answer("The fee is 1,250,000.")
        self.criteria({"kind": "number", "value": 1250000})

    def answer(self, text: str) -> None:
        self.trajectory.write_text(json.dumps({"messages": [{"role": "assistant", "content": text}]}))

    def criteria(self, *checks: Any, **more: Any) -> None:
        entries = [
            {"verifier_id": f"v{i}", "verifier_values": {"criteria": "c", "offline": check, **more}}
            for i, check in enumerate(checks)
        ]
        self.verifiers.write_text(json.dumps(entries))

    def grade(self) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-I", standalone.__file__, "--trajectory", self.trajectory]
        command += ["--verifiers", self.verifiers, "--filesystem", self.filesystem, "--out", self.out]
        return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=60)

    def read(self, name: str) -> Any:
        return json.loads((self.out / name).read_text())

    def written(self) -> set[str]:
        return {path.name for path in self.out.iterdir()}


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path)


def failed(trial: Trial, kind: str) -> str:
    """Grade; the grading must fail as `kind`. Returns the message."""
    done = trial.grade()
    assert done.returncode == 3, done.stdout + done.stderr
    assert trial.written() == {"grading_error.json"}
    error = trial.read("grading_error.json")
    assert error["kind"] == kind
    return str(error["message"])


def test_a_graded_trial(trial: Trial) -> None:
    trial.criteria({"kind": "number", "value": 1250000}, {"kind": "contains", "text": "buyer"})
    done = trial.grade()
    assert done.returncode == 0, done.stderr
    assert trial.written() == {"reward.json", "grading.json"}
    assert trial.read("reward.json") == {"reward": 0.5, "pass": 0.0, "criterion/v0": 1.0, "criterion/v1": 0.0}
    report = trial.read("grading.json")
    assert report["final_answer"] == "The fee is 1,250,000."
    assert [entry["is_criteria_true"] for entry in report["criteria"]] == [True, False]


def test_same_input_same_bytes(trial: Trial) -> None:
    trial.grade()
    first = (trial.out / "grading.json").read_bytes()
    trial.grade()
    assert (trial.out / "grading.json").read_bytes() == first


def test_a_reward_the_agent_wrote_is_removed(trial: Trial) -> None:
    trial.out.mkdir()
    (trial.out / "reward.json").write_text('{"reward": 42}')
    (trial.out / "reward.txt").write_text("42")
    (trial.out / "grading.json").mkdir()
    trial.grade()
    assert trial.written() == {"reward.json", "grading.json"}
    assert trial.read("reward.json")["reward"] == 1.0


def test_a_failure_removes_a_reward_the_agent_wrote(trial: Trial) -> None:
    trial.out.mkdir()
    (trial.out / "reward.json").write_text('{"reward": 42}')
    trial.verifiers.write_text("[]")
    failed(trial, "verifiers_malformed")


def test_a_linked_output_directory_is_refused(trial: Trial, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    trial.out.symlink_to(elsewhere)
    assert trial.grade().returncode == 3
    assert not list(elsewhere.iterdir())


def test_no_trajectory(trial: Trial) -> None:
    trial.trajectory.unlink()
    assert "no such file" in failed(trial, "trajectory_missing")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"messages": 3}', "null", "[" * 100_000])
def test_malformed_trajectories(trial: Trial, text: str) -> None:
    trial.trajectory.write_text(text)
    failed(trial, "trajectory_malformed")


def test_no_verifiers(trial: Trial) -> None:
    trial.verifiers.unlink()
    failed(trial, "verifiers_missing")


@pytest.mark.parametrize("text", ["", "{]", "{}", "[]", "[3]", '[{"verifier_id": ""}]', '[{"verifier_id": "a"}]'])
def test_malformed_verifiers(trial: Trial, text: str) -> None:
    trial.verifiers.write_text(text)
    failed(trial, "verifiers_malformed")


@pytest.mark.parametrize(
    ("check", "message"),
    [
        ({"kind": "guess"}, "verifiers[0]: verifier_values.offline: kind must be one of contains, regex"),
        ({"kind": "regex", "pattern": "("}, "pattern is not a regular expression"),
        ({"kind": "number", "value": "1"}, "value must be a finite number"),
        ({"kind": "number", "value": 1, "tolerance": -1}, "tolerance must not be negative"),
        ({"kind": "number", "value": 1, "tolerence": 1}, "unknown key 'tolerence'"),
        ({"kind": "file_exists", "path": "../x"}, "must not contain '..'"),
        ({"kind": "contains"}, "needs 'text'"),
        ([], "expected an object with 'kind'"),
    ],
)
def test_unusable_checks(trial: Trial, check: Any, message: str) -> None:
    trial.criteria(check)
    assert message in failed(trial, "verifiers_malformed")


def test_a_criterion_for_a_model_judge_is_no_zero(trial: Trial) -> None:
    trial.criteria({"kind": "contains", "text": "fee"}, None)
    assert "use an LLM judge" in failed(trial, "criterion_unjudgeable")


def test_a_runaway_pattern_is_no_zero(trial: Trial) -> None:
    trial.answer("a" * 60)
    trial.criteria({"kind": "regex", "pattern": "(a|a)*b"})
    failed(trial, "regex_timeout")


@pytest.mark.parametrize(
    ("messages", "answer"),
    [
        ([], ""),
        ([{"role": "user", "content": "fee"}], ""),
        ([{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}], "b"),
        ([{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [{}]}], "a"),
        ([{"role": "assistant", "content": "a"}, "junk", {"role": "assistant", "content": None}], "a"),
    ],
)
def test_the_final_answer_is_the_last_message_without_a_call(messages: list[Any], answer: str) -> None:
    assert standalone.final_answer({"messages": messages}) == answer


def test_negative_criteria(trial: Trial) -> None:
    trial.criteria({"kind": "contains", "text": "buyer"}, negative_criteria=True)
    trial.grade()
    assert trial.read("reward.json")["reward"] == 1.0
    trial.answer("the buyer pays")
    trial.grade()
    assert trial.read("reward.json")["reward"] == 0.0
    assert trial.read("grading.json")["criteria"][0]["is_criteria_true"] is True


def test_a_file_counts_only_when_it_is_a_plain_file_of_the_world(trial: Trial, tmp_path: Path) -> None:
    trial.criteria({"kind": "file_exists", "path": "/deals/peg.xlsx", "min_bytes": 3})
    deals = trial.filesystem / "deals"
    deals.mkdir()
    (tmp_path / "outside").write_text("long enough")
    (deals / "peg.xlsx").symlink_to(tmp_path / "outside")
    trial.grade()
    assert trial.read("reward.json")["reward"] == 0.0
    (deals / "peg.xlsx").unlink()
    for content, reward in (("ab", 0.0), ("abc", 1.0)):
        (deals / "peg.xlsx").write_text(content)
        trial.grade()
        assert trial.read("reward.json")["reward"] == reward


def test_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    script = f"import runpy, sys; runpy.run_path({standalone.__file__!r}, run_name='x')\n"
    script += "print([m for m in sys.modules if m.split('.')[0] in ('deskrl', 'pydantic', 'harbor')])"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
