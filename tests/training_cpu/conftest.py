"""The 7M test model, built once per machine into the ordinary cache."""

from pathlib import Path

import pytest

from deskrl.training.models import prepare_model


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The `tiny` model's folder."""
    return prepare_model("tiny")
