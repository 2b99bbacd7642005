"""Real harbor trials in the sandbox: the honest reward whatever the agent leaves behind, and a clean host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig, VerifierConfig
from harbor.models.trial.result import TrialResult
from harbor.trial.trial import Trial
from sandbox_helpers import folders

_TASK = """
schema_version = "1.2"
[agent]
timeout_sec = 60
[verifier]
timeout_sec = 60
[environment]
"""
# 0.5 for the answer, and 0.25 for a trajectory that is the harness's own. Slow enough for a daemon to win.
_TEST = """#!/bin/bash
reward=0
[ "$(cat /app/answer.txt)" = half ] && reward=0.5
grep -q '"cheated": false' /logs/agent/trajectory.json && reward=0.75
echo $reward >/logs/verifier/reward.txt
sleep 0.2
"""


def _write_task(folder: Path) -> Path:
    (folder / "environment").mkdir(parents=True)
    (folder / "environment" / "given.txt").write_text("input")
    (folder / "tests").mkdir()
    (folder / "tests" / "test.sh").write_text(_TEST)
    (folder / "instruction.md").write_text("Write half.")
    (folder / "task.toml").write_text(_TASK)
    return folder


async def _trial(folder: Path, scratch: Path, mode: str, clean: bool = True, **agent: float) -> TrialResult:
    config = TrialConfig(
        task=TaskConfig(path=_write_task(folder / "task")),
        trial_name="trial",
        trials_dir=folder / "trials",
        agent=AgentConfig(import_path="sandbox_agents:ScriptedAgent", kwargs={"mode": mode}, **agent),
        environment=EnvironmentConfig(
            import_path="deskrl.sandbox.bubblewrap:BubblewrapEnvironment", kwargs={"scratch_dir": str(scratch)}
        ),
        verifier=VerifierConfig(import_path="deskrl.sandbox.clean_verifier:CleanVerifier" if clean else None),
    )
    trial = await Trial.create(config)
    return await trial.run()


@pytest.mark.parametrize("mode", ["honest", "reward file", "daemon", "trajectory", "link"])
async def test_the_reward_is_the_honest_one(tmp_path: Path, scratch: Path, mode: str) -> None:
    result = await _trial(tmp_path, scratch, mode)
    assert result.exception_info is None
    assert result.verifier_result is not None and result.verifier_result.rewards == {"reward": 0.75}
    trajectory = tmp_path / "trials" / "trial" / "agent" / "trajectory.json"
    assert json.loads(trajectory.read_text()) == {"cheated": False}
    assert folders(scratch) == []


async def test_without_the_clean_verifier_the_daemon_would_win(tmp_path: Path, scratch: Path) -> None:
    result = await _trial(tmp_path, scratch, "daemon", clean=False)
    assert result.verifier_result is not None and result.verifier_result.rewards == {"reward": 42}


async def test_an_agent_that_hangs_times_out_and_leaves_nothing(tmp_path: Path, scratch: Path) -> None:
    result = await _trial(tmp_path, scratch, "hang", override_timeout_sec=2)
    assert result.exception_info is not None and result.exception_info.exception_type == "AgentTimeoutError"
    assert result.verifier_result is not None and result.verifier_result.rewards == {"reward": 0.75}
    assert folders(scratch) == []
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert [line for line in lines if b"7777" in line or str(scratch).encode() in line] == []
