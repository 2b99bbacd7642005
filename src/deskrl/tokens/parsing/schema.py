"""Types for arguments that a family writes as plain text.

XML families write every argument as characters, so only the tool's schema says whether `5` is a number or a string.
This decides that and nothing more: bounds, patterns, required names and what is inside an object are for the tool to
judge, as they are in families whose JSON carries its own types. A text that fits none of the declared types is an
error, never silently a string. A schema that declares no type takes JSON where the text is JSON, else the text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from deskrl.tokens.parsing.jsonvalue import load_json

JsonSchema = Mapping[str, Any]
ALL_KINDS = frozenset({"null", "integer", "number", "boolean", "object", "array", "string"})
_MAX_DEPTH = 40
_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}(\.0{1,20})?")
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")


class TypeMismatch(ValueError):
    """A text that fits none of the types its schema declares."""


class ArgumentTypes:
    """The types of one tool's arguments; `tool` is the schema of its parameters, None if the tool is unknown."""

    def __init__(self, tool: JsonSchema | None) -> None:
        self._root: JsonSchema = tool if isinstance(tool, Mapping) else {}
        self._references: dict[str, frozenset[str]] = {}

    def value(self, name: str, text: str) -> Any:
        """The value that `text` writes for the argument `name`.

        Raises:
            TypeMismatch: it fits none of the declared types.
        """
        kinds = self.kinds(name)
        if kinds == ALL_KINDS:
            try:
                return load_json(text)
            except ValueError:
                return text
        for kind, read in _READERS:
            if kind in kinds:
                found, value = read(text)
                if found:
                    return value
        # Templates print Python's None where a model's history holds a null.
        if "null" in kinds and text.strip() == "None":
            return None
        shown = text if len(text) <= 40 else text[:40] + "..."
        raise TypeMismatch(f"argument {name!r} must be {' or '.join(sorted(kinds)) or 'nothing'}, got {shown!r}")

    def kinds(self, name: str) -> frozenset[str]:
        """The JSON types that the argument's schema admits."""
        properties = self._root.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return self._kinds(properties[name], 0)
        return self._kinds(self._root.get("additionalProperties"), 0)

    def _kinds(self, schema: Any, depth: int) -> frozenset[str]:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return ALL_KINDS
        kinds = ALL_KINDS
        declared = schema.get("type")
        if isinstance(declared, str):
            kinds &= _named([declared])
        elif isinstance(declared, list):
            kinds &= _named(declared)
        if isinstance(schema.get("enum"), list):
            kinds &= frozenset(_kind_of(value) for value in schema["enum"]) or ALL_KINDS
        if "const" in schema:
            kinds &= frozenset({_kind_of(schema["const"])})
        for choice in ("anyOf", "oneOf"):
            if isinstance(schema.get(choice), list) and schema[choice]:
                kinds &= frozenset[str]().union(*(self._kinds(each, depth + 1) for each in schema[choice]))
        for each in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            kinds &= self._kinds(each, depth + 1)
        if isinstance(schema.get("$ref"), str):
            kinds &= self._reference(schema["$ref"], depth)
        return kinds

    def _reference(self, pointer: str, depth: int) -> frozenset[str]:
        if pointer not in self._references:
            # A reference met again while it is being resolved adds no type of its own.
            self._references[pointer] = frozenset()
            self._references[pointer] = self._kinds(self._target(pointer), depth + 1)
        return self._references[pointer]

    def _target(self, pointer: str) -> Any:
        found: Any = self._root if pointer.startswith("#") else None
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, Mapping) else None
        return found


def _named(names: Iterable[Any]) -> frozenset[str]:
    kinds = frozenset(name for name in names if isinstance(name, str))
    if not kinds or not kinds <= ALL_KINDS:
        return ALL_KINDS  # names that JSON Schema does not know declare nothing
    return kinds | {"integer"} if "number" in kinds else kinds


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    for type_, kind in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, type_):
            return kind
    return "object"


_Read = tuple[bool, Any]


def _null(text: str) -> _Read:
    return text.strip().lower() == "null", None


def _integer(text: str) -> _Read:
    digits = text.strip()
    if not _INTEGER.fullmatch(digits):
        return False, None
    return True, int(digits.partition(".")[0])


def _number(text: str) -> _Read:
    digits = text.strip()
    if not _NUMBER.fullmatch(digits):
        return False, None
    value = float(digits)
    return math.isfinite(value), value


def _boolean(text: str) -> _Read:
    word = text.strip().lower()
    return word in ("true", "false", "1", "0"), word in ("true", "1")


def _object(text: str) -> _Read:
    return _json(text, dict)


def _array(text: str) -> _Read:
    return _json(text, list)


def _json(text: str, type_: type) -> _Read:
    try:
        value = load_json(text)
    except ValueError:
        return False, None
    return isinstance(value, type_), value


def _string(text: str) -> _Read:
    return True, text


# The order decides between types that one text fits, the most special first.
_READERS = (
    ("null", _null),
    ("integer", _integer),
    ("number", _number),
    ("boolean", _boolean),
    ("object", _object),
    ("array", _array),
    ("string", _string),
)
