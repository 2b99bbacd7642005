"""Finding presets: by the name of one that ships, or as a YAML file of one's own. Imports nothing heavy."""

from __future__ import annotations

import difflib
from pathlib import Path

PRESETS = Path(__file__).resolve().parents[1] / "configs"


class PresetError(ValueError):
    """There is no such preset; the message names near ones."""


def preset_path(name: str) -> Path:
    """The file of a preset: a name from `deskrl/configs` (`smoke-cpu`), or a path to a YAML file.

    Raises PresetError when there is none.
    """
    own = Path(name).expanduser()
    if own.suffix in (".yaml", ".yml"):
        if own.is_file():
            return own.absolute()
        raise PresetError(f"no such preset file: {own}")
    shipped = PRESETS / f"{name}.yaml"
    if shipped.is_file():
        return shipped
    names = sorted(path.relative_to(PRESETS).with_suffix("").as_posix() for path in PRESETS.rglob("*.yaml"))
    close = difflib.get_close_matches(name, names, n=1)
    raise PresetError(
        f"no preset {name!r}; " + (f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(names)}")
    )
