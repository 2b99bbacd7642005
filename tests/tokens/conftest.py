"""Real tokenizers: SmolLM2's, and those of the model directories in DESKRL_TEST_MODELS (separated by colons)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deskrl.agent.model_files import load_chat_tokenizer
from deskrl.tokens import ChatMLRenderer
from deskrl.training.models import prepare_model

_EXTRA = [path for path in os.environ.get("DESKRL_TEST_MODELS", "").split(":") if path]


@pytest.fixture(scope="session", params=["tiny", *_EXTRA])
def model_dir(request: pytest.FixtureRequest) -> Path:
    """A directory with a ChatML tokenizer and its chat template."""
    return prepare_model(request.param)


@pytest.fixture(scope="session")
def renderer(model_dir: Path) -> ChatMLRenderer:
    return ChatMLRenderer(load_chat_tokenizer(str(model_dir)))
