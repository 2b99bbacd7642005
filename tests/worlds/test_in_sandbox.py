"""A sample task in a real sandbox: the world starts, its tools work, and test.sh grades what they left."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import httpx
import pytest
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths
from world_server import mcp_session

from deskrl.sandbox.bubblewrap import BubblewrapEnvironment
from deskrl.worlds.sample_tasks import build_sample_tasks


@pytest.mark.skipif(sys.platform != "linux", reason="sandboxes need Linux namespaces")
async def test_from_start_script_to_reward(pristine: Path, tmp_path: Path) -> None:
    task = {path.name: path for path in build_sample_tasks(tmp_path / "tasks")}["working-capital"]
    paths = TrialPaths(trial_dir=tmp_path / "trial")
    paths.mkdir()
    environment = BubblewrapEnvironment(
        environment_dir=task / "environment",
        environment_name="test",
        session_id="test",
        trial_paths=paths,
        task_env_config=EnvironmentConfig(),
        world_dir=pristine,
        trusted_agent_files=[],
    )
    await environment.start()
    try:
        await environment.spawn("/app/tools/start.sh working-capital", "/tmp/start.log")
        endpoint = environment.world_endpoint
        async with endpoint.http_client(timeout=60) as http:
            for _ in range(600):
                try:
                    if (await http.get(endpoint.base_url + "/health")).text == "OK":
                        break
                except httpx.TransportError:
                    await asyncio.sleep(0.1)
            async with mcp_session(http, endpoint.base_url) as session:
                arguments = {"file_path": "/deals/peg.xlsx", "rows": [["Working capital peg", 4375]]}
                made = await session.call_tool("excel_create_spreadsheet", arguments)
                assert not made.isError
        await environment.quiesce()
        answer = json.loads((task / "tests/golden_responses.json").read_text())[0]["gold_response"]
        trajectory = tmp_path / "trajectory.json"
        trajectory.write_text(json.dumps({"messages": [{"role": "assistant", "content": answer}]}))
        await environment.upload_file(trajectory, "/logs/agent/trajectory.json")
        await environment.upload_dir(task / "tests", "/tests")
        graded = await environment.exec("bash /tests/test.sh && cat /logs/verifier/reward.json", timeout_sec=60)
        assert graded.return_code == 0, graded.stderr
        assert '"reward": 1.0' in (graded.stdout or "")
    finally:
        await environment.stop()
