"""Where prepared models and sample tasks are kept between runs. Imports nothing."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$DESKRL_CACHE`, or ~/.cache/deskrl when the variable is unset or empty."""
    return Path(os.environ.get("DESKRL_CACHE") or "~/.cache/deskrl").expanduser()
