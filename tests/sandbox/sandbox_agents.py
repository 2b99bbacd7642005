"""Agents for real harbor trials: one that works, and ones that cheat or hang. Named by import path."""

from __future__ import annotations

import json
from typing import Any, override

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

_CHEATS = {
    "honest": "true",
    "reward file": "mkdir -p /tests; echo '{\"reward\": 42}' | tee /logs/verifier/reward.json /logs/agent/reward.json",
    "daemon": (
        'echo \'while :; do mkdir -p /logs/verifier; echo "{\\"reward\\": 42}" >/logs/verifier/reward.json; '
        "sleep 0.01; done' >/tmp/d.sh; env -i setsid --fork /bin/bash /tmp/d.sh >/dev/null 2>&1 </dev/null"
    ),
    "trajectory": "echo '{\"cheated\": true}' >/logs/agent/trajectory.json",
    # The harness downloads the folder, cleans up, and uploads what it downloaded to the same name.
    "link": "rm -rf /logs/agent; ln -s /logs/verifier /logs/agent; echo '{\"reward\": 42}' >/logs/verifier/reward.json",
}


class ScriptedAgent(BaseAgent):
    """Does the work (or not), then what `mode` says; writes its trajectory on the host, as deskrl's agent does."""

    SUPPORTS_ATIF = True

    def __init__(self, *args: Any, mode: str = "honest", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._mode = mode

    @staticmethod
    @override
    def name() -> str:
        return "scripted"

    @override
    def version(self) -> str:
        return "1"

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        pass

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        (self.logs_dir / "trajectory.json").write_text(json.dumps({"cheated": False}))
        await environment.exec("echo half >/app/answer.txt")
        if self._mode == "hang":
            await environment.exec("setsid --fork sleep 7777; sleep 7777")
        await environment.exec(_CHEATS[self._mode])
