"""Arguments of tools: what is converted, what is refused, and what the schema promises."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deskrl.worlds.roots import Root
from deskrl.worlds.toolkit import Tool, ToolError, tool_from


def probe(
    text: Annotated[str, "Some text"],
    count: int = 3,
    share: float = 0.5,
    flag: bool = False,
    names: list[str] | None = None,
    rows: list[list[Any]] | None = None,
) -> str:
    """Say what arrived.

    Not part of the description.
    """
    return json.dumps([text, count, share, flag, names, rows])


TOOL: Tool = tool_from("srv", probe)


def called(**arguments: Any) -> list[Any]:
    result: list[Any] = json.loads(TOOL.call(arguments))
    return result


def test_the_definition() -> None:
    definition = TOOL.definition()
    assert definition["name"] == "srv_probe"
    assert definition["description"] == "Say what arrived."
    schema = definition["inputSchema"]
    assert schema["required"] == ["text"]
    assert schema["properties"]["text"] == {"type": "string", "description": "Some text"}
    assert schema["properties"]["count"] == {"type": "integer", "default": 3}
    assert schema["properties"]["names"] == {"type": "array", "items": {"type": "string"}}
    assert schema["properties"]["rows"]["items"] == {"type": "array", "items": {}}


@pytest.mark.parametrize(
    ("name", "given_value", "value"),
    [
        ("count", "7", 7),
        ("count", 7.0, 7),
        ("share", 1, 1.0),
        ("share", "0.25", 0.25),
        ("flag", "True", True),
        ("flag", "false", False),
        ("names", '["a", "b"]', ["a", "b"]),
        ("rows", "[[1, null]]", [[1, None]]),
        ("names", None, None),
        ("count", None, 3),
        ("text", 5, "5"),
    ],
)
def test_what_models_get_wrong_is_converted(name: str, given_value: Any, value: Any) -> None:
    arguments = {"text": "x", name: given_value}
    assert called(**arguments)[["text", "count", "share", "flag", "names", "rows"].index(name)] == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "srv_probe: argument 'text' is required"),
        ({"text": "x", "cuont": 1}, "unknown argument 'cuont'; accepted: text, count, share, flag, names, rows"),
        ({"text": "x", "count": "many"}, "argument 'count' must be of type integer, got \"many\""),
        ({"text": "x", "count": True}, "argument 'count' must be of type integer"),
        ({"text": "x", "count": 1.5}, "argument 'count' must be of type integer"),
        ({"text": "x", "flag": 1}, "argument 'flag' must be of type boolean"),
        ({"text": "x", "names": "a"}, "argument 'names' must be of type array"),
        ({"text": "x", "names": ["a", 1]}, "argument 'names'[1] must be of type string"),
        ({"text": None}, "argument 'text' must be of type string"),
    ],
)
def test_the_rest_is_refused_with_a_reason(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolError) as caught:
        TOOL.call(arguments)
    assert message in str(caught.value)


def test_an_unsupported_parameter_is_a_programming_error() -> None:
    def bad(value: int | str) -> str:
        return str(value)

    with pytest.raises(TypeError, match=r"only `T \| None` unions"):
        tool_from("srv", bad)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
# No limits on time: the machine may be busy.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
NAMES = st.sampled_from(["text", "count", "share", "flag", "names", "rows", "other"])


@PATIENT
@given(st.dictionaries(NAMES, VALUES))
def test_any_arguments_are_run_as_typed_or_refused(arguments: dict[str, Any]) -> None:
    try:
        text, count, share, flag, names, rows = json.loads(TOOL.call(arguments))
    except ToolError:
        return
    assert isinstance(text, str)
    assert isinstance(count, int)
    assert not isinstance(count, bool)
    assert isinstance(share, float)
    assert isinstance(flag, bool)
    assert names is None or all(isinstance(name, str) for name in names)
    assert rows is None or all(isinstance(row, list) for row in rows)


@PATIENT
@given(st.text())
def test_no_path_leads_out_of_a_root(tmp_path_factory: pytest.TempPathFactory, path: str) -> None:
    root = Root.at(Path(tmp_path_factory.getbasetemp()) / "some-root")
    for candidate in (path, f"../{path}", f"/a/../../{path}"):
        with contextlib.suppress(ToolError):
            assert root.locate(candidate).is_relative_to(root.path)
