"""A scratch root that sandbox users can enter (pytest's own temporary folders are private), and sandboxes in it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox_helpers import Start, make_environment

from deskrl.sandbox.bubblewrap import BubblewrapEnvironment


@pytest.fixture
def scratch() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="dsb", dir="/tmp"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
async def start(tmp_path: Path, scratch: Path) -> AsyncIterator[Start]:
    """Starts sandboxes; stops them all at the end of the test."""
    started: list[BubblewrapEnvironment] = []

    async def begin(**kwargs: Any) -> BubblewrapEnvironment:
        environment = make_environment(tmp_path / str(len(started)), scratch, **kwargs)
        started.append(environment)
        await environment.start()
        return environment

    yield begin
    for environment in started:
        await environment.stop()
