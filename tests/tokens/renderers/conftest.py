"""SmolLM2's files, and one tokenizer of each family built on them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from render_models import any_model

from deskrl.tokens import ChatTokenizer
from deskrl.training.models import prepare_model


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The directory of SmolLM2's tokenizer."""
    return prepare_model("tiny")


@pytest.fixture(scope="session")
def load(tiny: Path) -> Callable[[str], ChatTokenizer]:
    """A model by name, loaded once."""
    return functools.cache(functools.partial(any_model, tiny))
