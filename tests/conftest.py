"""What several rooms' tests share: the tiny model and the sample tasks, made once a session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HARBOR_TELEMETRY", "0")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The 7M random Qwen3 (cached between sessions)."""
    from deskrl.training.models import prepare_model

    return prepare_model("tiny")


@pytest.fixture(scope="session")
def sample_set(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of the sample tasks and of their worlds."""
    from deskrl.worlds.sample_set import build_sample_set

    return build_sample_set(tmp_path_factory.mktemp("sample"))
