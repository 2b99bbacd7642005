"""harbor's verifier, run on a sandbox in which nothing of the agent's is alive.

harbor itself grades in the sandbox as the agent left it: a reward file written beforehand wins, and so does a
detached process that rewrites it later. Used through
`VerifierConfig(import_path="deskrl.sandbox.clean_verifier:CleanVerifier")`.
"""

from __future__ import annotations

from typing import override

from harbor.models.trial.paths import EnvironmentPaths
from harbor.models.verifier.result import VerifierResult
from harbor.verifier.verifier import Verifier


class CleanVerifier(Verifier):
    """Quiesces the sandbox, puts the harness's own agent logs in place, then grades as harbor does."""

    @override
    async def verify(self) -> VerifierResult:
        """Grade. Raises what harbor's verifier raises, and SandboxError when cleaning up failed.

        An environment without `quiesce` (another provider's) is graded as it is, after the log upload.
        """
        quiesce = getattr(self.environment, "quiesce", None)
        if quiesce is not None:
            await quiesce()
        # A reward left on the host by an earlier attempt must not stand in for one that is missing.
        for stale in (self.trial_paths.reward_json_path, self.trial_paths.reward_text_path):
            stale.unlink(missing_ok=True)
        agent_dir = EnvironmentPaths.for_os(self.environment.os).agent_dir
        await self.environment.empty_dirs([agent_dir], chmod=True)
        if self.trial_paths.agent_dir.is_dir():
            await self.environment.upload_dir(self.trial_paths.agent_dir, str(agent_dir))
        return await super().verify()
