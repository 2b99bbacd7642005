"""Can this host run sandboxes? Each check says what it looked at and, when it fails, what to change."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deskrl.sandbox.errors import SandboxError, SandboxUnavailable
from deskrl.sandbox.runtime import find_bwrap, require_tools
from deskrl.sandbox.scratch import default_scratch_root, prepare_root
from deskrl.sandbox.uids import uid_range

_USERNS_FIX = (
    "allow user namespaces: sysctl user.max_user_namespaces (not 0), kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container, a seccomp profile that allows them"
)


@dataclass(frozen=True)
class Check:
    """One finding: `fix` says what to do when `ok` is false, and is empty otherwise."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


def check_sandbox(scratch_dir: str | Path | None = None) -> list[Check]:
    """Run all checks, the last of which starts a real sandbox. Blocking; not from within an event loop."""
    root = Path(scratch_dir) if scratch_dir is not None else default_scratch_root()
    checks = [
        _check("sandbox mode", _mode),
        _check("bubblewrap binary", lambda: str(find_bwrap())),
        _check("host tools", _tools),
        _check("sandbox scratch folder", lambda: str(prepare_root(root))),
        _userns(),
    ]
    if all(check.ok for check in checks):
        checks.append(_start(root))
    return checks


def _check(name: str, probe: Callable[[], str]) -> Check:
    try:
        return Check(name, True, probe())
    except (SandboxUnavailable, OSError) as error:
        return Check(name, False, str(error), "do what the detail says")


def _mode() -> str:
    if os.geteuid() != 0:
        return f"unprivileged: all sandboxes run as uid {os.geteuid()}, kept apart by namespaces only"
    uids = uid_range()
    return f"root: each sandbox gets a host uid of its own from {uids.start}-{uids.stop - 1}"


def _tools() -> str:
    require_tools()
    return "all present"


def _userns() -> Check:
    limit = Path("/proc/sys/user/max_user_namespaces")
    try:
        count = int(limit.read_text())
    except (OSError, ValueError) as error:
        return Check("user namespaces", False, f"{limit}: {error}", _USERNS_FIX)
    return Check("user namespaces", count > 0, f"{limit} is {count}", "" if count > 0 else _USERNS_FIX)


def _start(root: Path) -> Check:
    import asyncio

    try:
        said = asyncio.run(_probe(root))
    except (SandboxUnavailable, SandboxError, OSError) as error:
        return Check("a sandbox starts", False, str(error), _USERNS_FIX)
    if said.splitlines()[-1:] == ["deskrl imported"]:
        return Check("a sandbox starts", True, "a command ran inside and Python imported deskrl")
    fix = "make the Python environment readable for all users (chmod -R o+rX)"
    return Check("a sandbox starts", False, f"Python inside could not import deskrl: {said[-500:]}", fix)


async def _probe(root: Path) -> str:
    from harbor.models.task.config import EnvironmentConfig
    from harbor.models.trial.paths import TrialPaths

    from deskrl.sandbox.bubblewrap import BubblewrapEnvironment

    with tempfile.TemporaryDirectory() as folder:
        environment = BubblewrapEnvironment(
            environment_dir=Path(folder),
            environment_name="doctor",
            session_id="doctor",
            trial_paths=TrialPaths(trial_dir=Path(folder)),
            task_env_config=EnvironmentConfig(),
            scratch_dir=root,
            run_id="doctor",
        )
        await environment.start()
        try:
            done = await environment.exec("$DESKRL_PYTHON -c 'import deskrl; print(\"deskrl imported\")' 2>&1")
        finally:
            await environment.stop()
    return (done.stdout or "").strip()
