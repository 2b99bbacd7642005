"""Task directories, sound and broken: each fault is found, named and given a remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deskrl.tasks.load import TaskFormatError, bucket_of, find_tasks, lint_task, load_task
from deskrl.tasks.problems import Problem

VERIFIERS = "tests/verifiers.json"


def problems(task: Path, **environ: str) -> list[str]:
    return [str(problem) for problem in lint_task(task, environ)]


def the_problem(task: Path, **environ: str) -> Problem:
    (problem,) = lint_task(task, environ)
    return problem


def change(path: Path, edit: Callable[[Any], None]) -> None:
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def test_a_sound_task_has_no_problems_and_loads_whole(task: Path) -> None:
    assert lint_task(task, {}) == []
    loaded = load_task(task, {})
    assert loaded.task_id == "task_sample_01"
    assert loaded.slug == "revenue-2025"
    assert loaded.instruction.startswith("What is Brightwater's revenue")
    assert [v.verifier_index for v in loaded.verifiers] == [0, 1, 2, 3]
    assert (loaded.timeouts.agent, loaded.timeouts.verifier) == (300.0, 60.0)
    assert loaded.offline_gradable
    assert loaded.bucket == "other"
    assert loaded.path == task.resolve()


def test_gold_answers_are_not_part_of_a_task(task: Path) -> None:
    gold = json.loads((task / "tests/golden_responses.json").read_text())[0]["gold_response"]
    assert gold not in repr(load_task(task, {}))


@pytest.mark.parametrize(
    ("world", "bucket"),
    [
        ("investment-banking-7", "ib"),
        ("law-409", "law"),
        ("management-consulting-x", "consulting"),
        ("lawyers", "other"),
        ("", "other"),
    ],
)
def test_buckets_follow_the_prefix(world: str, bucket: str) -> None:
    assert bucket_of(world) == bucket


class TestFindTasks:
    def test_finds_tasks_at_any_depth_in_order(self, task: Path, tmp_path: Path) -> None:
        other = tmp_path / "tasks" / "deep" / "er" / "two"
        other.mkdir(parents=True)
        (other / "task.toml").write_text("")
        assert find_tasks(tmp_path) == sorted([task, other])

    def test_a_task_itself_is_found(self, task: Path) -> None:
        assert find_tasks(task) == [task]

    def test_builds_in_progress_and_files_of_a_task_are_not_tasks(self, task: Path, tmp_path: Path) -> None:
        for folder in (tmp_path / "tasks" / ".x.build-1", task / "tests" / "runner"):
            folder.mkdir()
            (folder / "task.toml").write_text("")
        assert find_tasks(tmp_path) == [task]

    def test_no_directory(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"nowhere: no such directory; give a folder of tasks"):
            find_tasks(tmp_path / "nowhere")


class TestDirectories:
    def test_missing(self, tmp_path: Path) -> None:
        path = tmp_path / "gone"
        assert problems(path) == [f"error: {path}: no such directory. give the path of a task directory"]
        with pytest.raises(TaskFormatError, match=r"gone is not usable:\n.*no such directory"):
            load_task(path, {})

    def test_empty(self, tmp_path: Path) -> None:
        assert problems(tmp_path) == [f"error: {tmp_path}: the directory is empty. give the path of a task directory"]

    def test_a_file(self, task: Path) -> None:
        path = task / "task.toml"
        assert problems(path) == [f"error: {path}: is a file, not a directory. give the path of a task directory"]

    @pytest.mark.parametrize(
        "name",
        ["instruction.md", "task.toml", "archipelago.json", "environment/Dockerfile", "tests/test.sh", VERIFIERS],
    )
    def test_a_required_file_is_missing(self, task: Path, name: str) -> None:
        (task / name).unlink()
        problem = the_problem(task)
        assert (problem.file, problem.rule) == (name, "the file is missing")
        with pytest.raises(TaskFormatError) as caught:
            load_task(task, {})
        assert caught.value.file == name

    @pytest.mark.parametrize("name", ["tests/golden_responses.json", "tests/grade.py"])
    def test_the_rest_is_optional(self, task: Path, name: str) -> None:
        (task / name).unlink()
        assert lint_task(task, {}) == []


class TestSyntax:
    @pytest.mark.parametrize("name", ["archipelago.json", VERIFIERS, "tests/golden_responses.json"])
    def test_json_errors_name_the_place(self, task: Path, name: str) -> None:
        (task / name).write_text('{"a": 1,\n "b" 2}')
        problem = the_problem(task)
        assert problem.file == name
        assert problem.rule == "is not JSON (Expecting ':' delimiter: line 2 column 6 (char 14))"

    @pytest.mark.parametrize("name", ["archipelago.json", VERIFIERS])
    def test_null_documents(self, task: Path, name: str) -> None:
        (task / name).write_text("null")
        assert problems(task) == [f"error: {name}: holds null. write the document into it"]

    def test_toml_errors_name_the_place(self, task: Path) -> None:
        append(task / "task.toml", "cpus = = 1\n")
        assert "is not TOML (Invalid value (at line 16, column 8))" in the_problem(task).rule

    def test_text_that_is_not_utf8(self, task: Path) -> None:
        (task / "instruction.md").write_bytes(b"\xff\xfe")
        assert "cannot be read as UTF-8" in the_problem(task).rule

    def test_an_empty_instruction(self, task: Path) -> None:
        (task / "instruction.md").write_text(" \n")
        assert problems(task) == ["error: instruction.md: the file is empty. write the prompt into it"]


class TestTaskToml:
    def test_unknown_keys_get_a_suggestion(self, task: Path) -> None:
        append(task / "task.toml", "memory_gb = 2\n")
        assert problems(task) == ["error: task.toml: environment.memory_gb: unknown key. did you mean 'memory_mb'?"]

    def test_unknown_sections(self, task: Path) -> None:
        append(task / "task.toml", "[verifyer]\ntimeout_sec = 1\n")
        assert problems(task) == ["error: task.toml: verifyer: unknown key. did you mean 'verifier'?"]

    @pytest.mark.parametrize("value", ["-1.0", "0.0", "inf", "nan"])
    def test_timeouts_must_be_positive(self, task: Path, value: str) -> None:
        path = task / "task.toml"
        path.write_text(path.read_text().replace("timeout_sec = 300.0", f"timeout_sec = {value}"))
        assert "agent.timeout_sec: must be a positive number" in problems(task)[0]

    def test_a_wrong_type(self, task: Path) -> None:
        path = task / "task.toml"
        path.write_text(path.read_text().replace("cpus = 1", 'cpus = "many"'))
        problem = the_problem(task)
        assert (problem.file, problem.key) == ("task.toml", "environment.cpus")

    def test_an_unset_variable(self, task: Path) -> None:
        append(task / "task.toml", '[verifier.env]\nKEY = "${JUDGE_KEY}"\n')
        assert problems(task) == [
            "error: task.toml: verifier.env.KEY: the environment variable JUDGE_KEY is not set. "
            "export JUDGE_KEY, or give a default: ${JUDGE_KEY:-...}"
        ]
        assert problems(task, JUDGE_KEY="x") == []

    def test_a_variable_with_a_default(self, task: Path) -> None:
        append(task / "task.toml", '[verifier.env]\nKEY = "${JUDGE_KEY:-none}"\n')
        assert problems(task) == []

    def test_a_variable_within_a_value(self, task: Path) -> None:
        append(task / "task.toml", '[verifier.env]\nKEY = "a-${JUDGE_KEY}"\n')
        assert "a ${VAR} must be the whole value" in the_problem(task, JUDGE_KEY="x").rule


class TestArchipelago:
    @pytest.mark.parametrize("key", ["task_id", "task_slug", "world_id", "required_env_keys", "needs_snapshot"])
    def test_required_keys(self, task: Path, key: str) -> None:
        change(task / "archipelago.json", lambda d: d.pop(key))
        problem = the_problem(task)
        assert (problem.file, problem.key, problem.rule) == ("archipelago.json", key, "the key is required")

    def test_a_misspelt_key(self, task: Path) -> None:
        change(task / "archipelago.json", lambda d: d.update(need_snapshot=True))
        assert problems(task) == ["error: archipelago.json: need_snapshot: unknown key. did you mean 'needs_snapshot'?"]

    def test_a_foreign_key_is_only_a_warning(self, task: Path) -> None:
        change(task / "archipelago.json", lambda d: d.update(zzz=1))
        assert the_problem(task).severity == "warning"
        assert load_task(task, {}).task_id == "task_sample_01"

    @pytest.mark.parametrize("slug", ["", "../up", "a b", "-x", "a;reboot"])
    def test_slugs_are_safe_on_a_command_line(self, task: Path, slug: str) -> None:
        change(task / "archipelago.json", lambda d: d.update(task_slug=slug))
        assert the_problem(task).key == "task_slug"


class TestVerifiers:
    @pytest.mark.parametrize("document", ["[]", "{}", '"x"'])
    def test_must_be_a_list(self, task: Path, document: str) -> None:
        (task / VERIFIERS).write_text(document)
        assert the_problem(task).rule == "must be a non-empty list"

    def test_ids_are_unique(self, task: Path) -> None:
        change(task / VERIFIERS, lambda d: d[1].update(verifier_id=d[0]["verifier_id"]))
        assert the_problem(task).rule == "the verifier_id occurs twice"

    def test_of_another_task(self, task: Path) -> None:
        change(task / VERIFIERS, lambda d: d[2].update(task_id="other"))
        assert problems(task) == [
            "error: tests/verifiers.json: [2].task_id: is 'other', but archipelago.json says 'task_sample_01'. "
            "make both the same"
        ]

    @pytest.mark.parametrize(
        ("check", "expected"),
        [
            ({"kind": "number", "value": 1, "tolerence": 2}, "tolerence: unknown key. did you mean 'tolerance'?"),
            ({"kind": "regex", "pattern": "("}, "is not a regular expression"),
            ({"kind": "regex", "pattern": "x", "tolerance": 1}, "tolerance: unknown key"),
            ({"kind": "file_exists", "path": "a/../b"}, "must not contain '..'"),
            ({"kind": "guess"}, "'guess'"),
            ({"kind": "number"}, "the key is required"),
            ({"kind": "number", "value": True}, "offline.number.value"),
        ],
    )
    def test_offline_checks(self, task: Path, check: dict[str, Any], expected: str) -> None:
        change(task / VERIFIERS, lambda d: d[0]["verifier_values"].update(offline=check))
        found = problems(task)
        assert any(expected in problem and problem.startswith("error") for problem in found), found

    def test_a_task_for_a_model_judge_is_not_offline_gradable(self, task: Path) -> None:
        change(task / VERIFIERS, lambda d: d[0]["verifier_values"].pop("offline"))
        assert not load_task(task, {}).offline_gradable


def test_hints(task: Path) -> None:
    (task / "tests/hints.json").write_text('[{"hint": "look in /deals"}]')
    assert load_task(task, {}).hints == ("look in /deals",)
    (task / "tests/hints.json").write_text('["look"]')
    assert the_problem(task).rule == 'must be a list of {"hint": text}'


def test_every_fault_is_reported_at_once(task: Path) -> None:
    (task / "instruction.md").unlink()
    append(task / "task.toml", "memory_gb = 2\n")
    (task / "archipelago.json").write_text("[")
    with pytest.raises(TaskFormatError) as caught:
        load_task(task, {})
    assert {p.file for p in caught.value.problems} == {"instruction.md", "task.toml", "archipelago.json"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(name=st.sampled_from(["archipelago.json", VERIFIERS, "tests/golden_responses.json"]), data=st.data())
def test_any_json_in_any_place_gives_problems_and_never_a_crash(task: Path, name: str, data: st.DataObject) -> None:
    path = task / name
    original = path.read_text()
    document = json.loads(original)
    node: Any = document
    while True:  # walk to a random place
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    node[key] = data.draw(JSON)
    path.write_text(json.dumps(document))
    try:
        errors = [p for p in lint_task(task, {}) if p.severity == "error"]
        if errors:
            with pytest.raises(TaskFormatError):
                load_task(task, {})
        else:
            load_task(task, {})
    finally:
        path.write_text(original)
