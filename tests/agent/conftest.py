"""The sample world, and SmolLM2's tokenizer from the tiny model's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from deskrl.agent.model_files import load_chat_tokenizer
from deskrl.tokens import ChatTokenizer
from deskrl.training.models import prepare_model
from deskrl.worlds.sample import build_sample_world


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sample world that no test may change."""
    return build_sample_world(tmp_path_factory.mktemp("pristine") / "world")


@pytest.fixture(scope="session")
def tiny() -> Path:
    return prepare_model("tiny")


@pytest.fixture(scope="session")
def tokenizer(tiny: Path) -> ChatTokenizer:
    return load_chat_tokenizer(str(tiny))
