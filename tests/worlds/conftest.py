"""Sample worlds to read and to change, and a gateway per transport."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from world_server import Gateway, start

from deskrl.worlds.sample import build_sample_world


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sample world that no test may change."""
    return build_sample_world(tmp_path_factory.mktemp("pristine") / "world")


@pytest.fixture
def world(pristine: Path, tmp_path: Path) -> Path:
    """A sample world of the test's own."""
    return shutil.copytree(pristine, tmp_path / "world")


@pytest.fixture(scope="module", params=["uds", "tcp"])
def gateway(request: pytest.FixtureRequest, pristine: Path) -> Iterator[Gateway]:
    """A gateway over a copy of the sample world, shared by the tests of a module."""
    # Unix socket paths are limited to 107 bytes; pytest's own temporary paths can be longer.
    with tempfile.TemporaryDirectory(prefix="gw", dir="/tmp") as run:
        world = shutil.copytree(pristine, Path(run) / "world")
        gateway = start(world, request.param, Path(run))
        try:
            yield gateway
        finally:
            os.kill(gateway.process.pid, signal.SIGTERM)
            gateway.process.wait(60)
