"""JSON as models write it, read so that it can be written again.

Everything accepted here survives a file, a server and the next prompt: no NaN, no infinity, no half of a surrogate
pair. Every failure is a ValueError, nesting too deep for the reader included.
"""

from __future__ import annotations

import json
import math
from typing import Any


def load_json(text: str) -> Any:
    """JSON that can also be written again: no NaN, no infinity, no half of a surrogate pair."""
    try:
        return _checked(_DECODER.decode(text))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def load_json_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that starts at an offset, and the offset after it."""
    try:
        value, end = _DECODER.raw_decode(text, start)
        return _checked(value), end
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def load_arguments(value: Any) -> dict[str, Any]:
    """The arguments of a call: an object, a JSON string of one (some models write that), or nothing.

    Raises:
        ValueError: the string is no JSON.
        TypeError: it is not an object.
    """
    if isinstance(value, str):
        value = load_json(value) if value.strip() else {}
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise TypeError(f"arguments must be an object, got {type(value).__name__}")
    return value


def _checked(value: Any) -> Any:
    json.dumps(value, ensure_ascii=False).encode()
    return value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse(digits)


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
