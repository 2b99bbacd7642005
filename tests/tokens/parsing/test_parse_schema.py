"""Arguments written as text get the type that the tool's schema declares, or an error; never silently a string."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskrl.tokens.parsing import ArgumentTypes, TypeMismatch

INTEGER, STRING, NULL = {"type": "integer"}, {"type": "string"}, {"type": "null"}
DEFINITIONS = {
    "level": INTEGER,
    "alias": {"$ref": "#/$defs/level"},
    "a/b~c": {"type": "boolean"},
    "loop": {"$ref": "#/$defs/loop"},
    "tree": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/tree"}}, INTEGER]},
}


def value(schema: Any, text: str) -> Any:
    return ArgumentTypes({"type": "object", "properties": {"x": schema}, "$defs": DEFINITIONS}).value("x", text)


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        (STRING, "5", "5"),
        (STRING, "null", "null"),
        (STRING, "  a\nb ", "  a\nb "),
        (STRING, "", ""),
        (INTEGER, "5", 5),
        (INTEGER, " -07\n", -7),
        (INTEGER, "5.0", 5),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "-.5e1", -5.0),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "1", True),
        (NULL, "null", None),
        (NULL, "None", None),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "object"}, '\n{"a": [null]}\n', {"a": [None]}),
        ({"anyOf": [STRING, NULL]}, "null", None),
        ({"anyOf": [STRING, NULL]}, "None", "None"),
        ({"anyOf": [STRING, NULL]}, "no", "no"),
        ({"oneOf": [INTEGER, {"type": "array"}]}, "[5]", [5]),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": ["integer", "string"]}, "5", 5),
        ({"type": ["boolean", "integer"]}, "1", 1),
        ({"anyOf": [INTEGER, {"anyOf": [NULL, STRING]}]}, "x", "x"),
        ({"allOf": [{"type": ["integer", "string"]}, STRING]}, "5", "5"),
        ({"enum": ["5", "6"]}, "5", "5"),
        ({"enum": [5, None]}, "5", 5),
        ({"const": True}, "true", True),
        ({"$ref": "#/$defs/alias"}, "4", 4),
        ({"$ref": "#/$defs/a~1b~0c"}, "true", True),
        ({"$ref": "#/$defs/tree"}, "[[1], 2]", [[1], 2]),
        # No type declared, or none that can be found: JSON if the text is JSON.
        ({}, "5", 5),
        ({}, "plain", "plain"),
        (True, "[1]", [1]),
        (None, "x", "x"),
        ({"type": "varchar"}, '{"a": 1}', {"a": 1}),
        ({"$ref": "#/$defs/nowhere"}, "5", 5),
        ({"$ref": "elsewhere.json"}, "x", "x"),
    ],
)
def test_texts_get_their_type(schema: Any, text: str, expected: Any) -> None:
    found = value(schema, text)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (INTEGER, "five"),
        (INTEGER, "5.5"),
        (INTEGER, "1_000"),
        (INTEGER, "\uff15"),  # a full-width digit: a number to Python, not to JSON
        (INTEGER, ""),
        (INTEGER, "9" * 5000),
        (INTEGER, '"5"'),
        ({"type": "number"}, "NaN"),
        ({"type": "number"}, "1e999"),
        ({"type": "number"}, "0x10"),
        ({"type": "boolean"}, "yes"),
        (NULL, "nothing"),
        ({"type": "array"}, '{"a": 1}'),
        ({"type": "object"}, "{'a': 1}"),
        ({"type": "object"}, '{"a": NaN}'),
        ({"type": "object"}, "[" * 100_000),
        ({"anyOf": [INTEGER, NULL]}, "x"),
        ({"enum": [1, 2]}, "one"),
        ({"$ref": "#/$defs/level"}, "x"),
        ({"$ref": "#/$defs/loop"}, "x"),
        ({"allOf": [INTEGER, STRING]}, "5"),
    ],
)
def test_texts_that_do_not_fit_are_errors_naming_the_argument(schema: Any, text: str) -> None:
    with pytest.raises(TypeMismatch, match="argument 'x' must be"):
        value(schema, text)


def test_undeclared_arguments_follow_additional_properties() -> None:
    assert ArgumentTypes({"properties": {}, "additionalProperties": STRING}).value("other", "5") == "5"
    assert ArgumentTypes({"properties": {}, "additionalProperties": False}).value("other", "5") == 5
    assert ArgumentTypes(None).value("other", '{"a": 1}') == {"a": 1}


def test_broken_schemas_declare_nothing() -> None:
    for tool in ({"properties": []}, {"properties": {"x": []}}, {"properties": {"x": {"type": 3, "anyOf": 1}}}):
        assert ArgumentTypes(tool).value("x", "5") == 5


def test_a_long_value_is_not_repeated_in_the_error() -> None:
    with pytest.raises(TypeMismatch) as caught:
        value(INTEGER, "x" * 10_000)
    assert len(str(caught.value)) < 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}


@given(JSON)
def test_what_a_template_writes_is_read_back(written: Any) -> None:
    text = written if isinstance(written, str) else json.dumps(written)
    schema = {"type": NAMES.get(type(written), "object")}
    assert value(schema, text) == written


@given(st.booleans() | st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False))
def test_scalars_as_python_prints_them_are_read_back(written: Any) -> None:
    found = value({"type": NAMES[type(written)]}, str(written))
    assert found == written and isinstance(found, bool) == isinstance(written, bool)
