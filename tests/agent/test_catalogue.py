"""The catalogue: flat for the model, wrapped for the server; and the texts that go with it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskrl.agent import prompts
from deskrl.agent.catalogue import compact, essential, make_tool, server_of

MAIL = {
    "type": "object",
    "title": "Mail",
    "properties": {
        "to": {"type": "array", "items": {"type": "string"}, "title": "To"},
        "title": {"type": "string", "title": "Title"},
        "options": {"anyOf": [{"type": "object"}, {"type": "null"}]},
    },
    "required": ["to"],
}


def _enveloped(name: str, *, reference: bool) -> dict[str, Any]:
    if reference:
        return {"type": "object", "properties": {name: {"$ref": "#/$defs/Mail"}}, "$defs": {"Mail": MAIL}}
    return {"type": "object", "properties": {name: MAIL}, "required": [name]}


@pytest.mark.parametrize("envelope", ["request", "input"])
@pytest.mark.parametrize("reference", [True, False])
def test_an_envelope_is_taken_off_and_put_back(envelope: str, reference: bool) -> None:
    tool = make_tool("mail_send", "Sends.", _enveloped(envelope, reference=reference))
    assert tool.envelope == envelope
    assert tool.parameters["properties"] == MAIL["properties"] and tool.parameters["required"] == ["to"]
    sent = {envelope: {"to": ["a"], "title": "t"}}
    assert tool.dispatch_arguments({"to": ["a"], "title": "t"}) == sent
    # Models that write the envelope all the same, or write it as a JSON string, are understood.
    assert tool.dispatch_arguments(sent) == sent
    assert tool.dispatch_arguments({envelope: '{"to": ["a"], "title": "t"}'}) == sent
    assert tool.dispatch_arguments({}) == {envelope: {}}


def test_an_argument_named_like_the_envelope_is_not_unwrapped() -> None:
    inner = {"type": "object", "properties": {"input": {"type": "object"}}}
    tool = make_tool("t", "", {"type": "object", "properties": {"input": inner}})
    assert tool.dispatch_arguments({"input": {"a": 1}}) == {"input": {"input": {"a": 1}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"input": {"type": "string"}}},
        {"type": "object", "properties": {"input": {"type": "object"}}},
        {"type": "object", "properties": {"payload": MAIL}},
        {"type": "object", "properties": {"request": MAIL, "more": {"type": "string"}}},
        {"type": "object", "properties": {"request": {"$ref": "#/$defs/Absent"}}},
        {"type": "object", "properties": {"request": True}},
        {"type": "object"},
    ],
)
def test_other_schemas_stay_as_they_are(schema: dict[str, Any]) -> None:
    tool = make_tool("t", "", schema)
    assert tool.envelope is None and tool.parameters == schema
    assert tool.dispatch_arguments({"input": "x"}) == {"input": "x"}


@pytest.mark.parametrize(
    ("schema", "written", "sent"),
    [
        ({"type": "array"}, '["a"]', ["a"]),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": ["array", "null"]}, "[1]", [1]),
        ({"anyOf": [{"type": "array"}, {"type": "null"}]}, "[1]", [1]),
        ({"$ref": "#/$defs/Box"}, '{"a": 1}', {"a": 1}),
        ({"anyOf": [{"$ref": "#/$defs/Box"}, {"type": "null"}]}, '{"a": 1}', {"a": 1}),
        # What is or may be a string stays one; so does what is no container at all.
        ({"type": "string"}, '["a"]', '["a"]'),
        ({"type": ["array", "string"]}, "[1]", "[1]"),
        ({"anyOf": [{"type": "array"}, {"type": "string"}]}, "[1]", "[1]"),
        ({"type": "array"}, "a, b", "a, b"),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({"type": "array"}, "3", "3"),
        ({"type": "array"}, [1], [1]),
        ({}, "[1]", "[1]"),
        (True, "[1]", "[1]"),
    ],
)
def test_containers_written_as_strings(schema: Any, written: Any, sent: Any) -> None:
    root = {"type": "object", "properties": {"v": schema, "w": {}}, "$defs": {"Box": {"type": "object"}}}
    assert make_tool("t", "", root).dispatch_arguments({"v": written, "unknown": written}) == {
        "v": sent,
        "unknown": written,
    }


def test_compact_keeps_what_a_model_needs() -> None:
    tool = make_tool("mail_send", "\nSends a mail.\nLong explanation.", _enveloped("request", reference=True))
    function = compact(tool)["function"]
    assert function["description"] == "Sends a mail."
    # A property called title is not a title.
    assert function["parameters"]["properties"]["title"] == {"type": "string"}
    assert "title" not in function["parameters"]["$defs"]["Mail"]
    assert function["parameters"]["required"] == ["to"]
    # The tool itself is as it was.
    assert tool.definition()["function"]["description"].endswith("Long explanation.")


def test_essential_leaves_the_required_arguments() -> None:
    tool = essential(make_tool("mail_send", "", _enveloped("request", reference=False)))
    assert list(tool.parameters["properties"]) == ["to"]
    assert tool.dispatch_arguments({"to": '["a"]', "title": "t"}) == {"request": {"to": ["a"], "title": "t"}}
    assert essential(make_tool("t", "", {"type": "object"})).parameters["properties"] == {}


def test_the_longest_server_name_owns_a_tool() -> None:
    assert server_of("file_system_read", ["file", "file_system"]) == "file_system"
    assert server_of("file_read", ["file", "file_system"]) == "file"
    assert server_of("filex", ["file"]) is None


@given(st.text(max_size=200), st.integers(0, 250))
def test_clip_keeps_head_and_tail(text: str, limit: int) -> None:
    clipped = prompts.clip(text, limit)
    if len(text) <= limit:
        assert clipped == text
        return
    head, rest = text[: limit * 2 // 3], text[len(text) - limit // 3 :]
    assert clipped.startswith(head + "\n[... ") and clipped.endswith(" left out ...]\n" + rest)
    assert f"{len(text) - len(head) - len(rest)} characters" in clipped
    assert len(clipped) <= limit + 40


def test_clip_with_no_room_shows_nothing() -> None:
    assert prompts.clip("secret", 0) == "\n[... 6 characters left out ...]\n"
