"""The 7M test model, built once per machine into the ordinary cache."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the engine and the workers run; read when torch loads

from deskrl.training.models import prepare_model


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The `tiny` model's folder."""
    return prepare_model("tiny")
