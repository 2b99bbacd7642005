"""Problems of a task directory: what is wrong, where, by which rule, and how to mend it.

Model: a `Problem` names a file, a key in it, the rule broken and the fix. Functions here find problems
that pydantic and harbor do not report: unknown keys (with the nearest known one) and JSON that does
not parse.

Invariant: the functions are pure; they report everything they find and stop at nothing.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError


@dataclass(frozen=True)
class Problem:
    """One fault of a task. `severity` is `error` (the task cannot be used) or `warning`."""

    file: str
    key: str
    rule: str
    fix: str
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        where = f"{self.file}: {self.key}" if self.key else self.file
        return f"{self.severity}: {where}: {self.rule}. {self.fix}"


class TaskFormatError(Exception):
    """A task that does not follow the format. `problems` holds every fault found, never just the first.

    `file`, `key`, `rule` and `fix` are those of the first error.
    """

    def __init__(self, path: str, problems: tuple[Problem, ...]) -> None:
        listing = "\n".join(f"  {problem}" for problem in problems)
        super().__init__(f"task {path} is not usable:\n{listing}")
        self.path = path
        self.problems = problems
        first = next((p for p in problems if p.severity == "error"), problems[0])
        self.file, self.key, self.rule, self.fix = first.file, first.key, first.rule, first.fix


def from_validation(file: str, error: ValidationError, prefix: str = "") -> Iterator[Problem]:
    """Yield a problem for each fault of a pydantic validation, but for unknown keys: see `unknown_keys`."""
    for fault in error.errors(include_url=False):
        if fault["type"] == "extra_forbidden":
            continue
        key = _join(prefix, *fault["loc"])
        if fault["type"] == "missing":
            yield Problem(file, key, "the key is required", f"add {fault['loc'][-1]!r}")
        else:
            message = fault["msg"].removeprefix("Value error, ")
            yield Problem(file, key, message, f"correct the value {_brief(fault.get('input'))}")


def unknown_keys(
    file: str,
    model: type[BaseModel],
    data: Any,
    *,
    prefix: str = "",
    extra: Mapping[type[BaseModel], frozenset[str]] | None = None,
    lenient: bool = False,
) -> Iterator[Problem]:
    """Yield a problem for each key of `data` that `model` does not know, at any depth.

    `extra` adds accepted keys per model (deprecated spellings). With `lenient`, a key that resembles no
    known one is only a warning: data made elsewhere may carry more than is used here. A model that forbids
    extra keys is never lenient.
    """
    if not isinstance(data, dict):
        return
    lenient = lenient and model.model_config.get("extra") != "forbid"
    fields = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
    accepted = set(fields) | (extra or {}).get(model, frozenset())
    for key, value in data.items():
        if key not in accepted:
            close = difflib.get_close_matches(str(key), sorted(accepted), n=1, cutoff=0.6)
            fix = f"did you mean {close[0]!r}?" if close else f"remove it; known: {', '.join(sorted(fields))}"
            severity: Literal["error", "warning"] = "warning" if lenient and not close else "error"
            yield Problem(file, _join(prefix, key), "unknown key", fix, severity)
        elif key in fields:
            yield from _below(file, fields[key], value, _join(prefix, key), extra, lenient)


def _below(
    file: str,
    annotation: Any,
    value: Any,
    prefix: str,
    extra: Mapping[type[BaseModel], frozenset[str]] | None,
    lenient: bool,
) -> Iterator[Problem]:
    """Descend into the models that an annotation holds: itself, optionals and lists; not free dicts."""
    origin = get_origin(annotation)
    if origin is Annotated:
        annotation = get_args(annotation)[0]
        origin = get_origin(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from unknown_keys(file, annotation, value, prefix=prefix, extra=extra, lenient=lenient)
    elif origin in (Union, types.UnionType):
        for option in get_args(annotation):
            if _tagged_for(option, value):
                yield from _below(file, option, value, prefix, extra, lenient)
    elif origin in (list, tuple) and isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _below(file, get_args(annotation)[0], entry, f"{prefix}[{index}]", extra, lenient)


def _tagged_for(option: Any, value: Any) -> bool:
    """Whether an option of a union can be meant: no `Literal` field of it contradicts `value`."""
    if not (isinstance(option, type) and issubclass(option, BaseModel) and isinstance(value, dict)):
        return True
    for name, field in option.model_fields.items():
        if get_origin(field.annotation) is Literal and value.get(name) not in get_args(field.annotation):
            return False
    return True


def _join(prefix: str, *parts: Any) -> str:
    key = prefix
    for part in parts:
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else str(part)
    return key


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
