"""Hermes tool calls: what a template writes is read back; everything else has a typed reason and a position."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskrl.tokens import ToolCall, parse_hermes

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "f"', "}", '"', "\\", "\n", "1e999", "NaN"]
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=8,
)
_CALLS = st.lists(st.builds(ToolCall, _TEXT.filter(bool), st.dictionaries(_TEXT, _JSON, max_size=4)), max_size=3)


def _block(call: ToolCall, **options: Any) -> str:
    text = json.dumps({"name": call.name, "arguments": call.arguments}, **options)
    return f"<tool_call>\n{text}\n</tool_call>"


def _speech(text: str) -> bool:
    return not any(tag in text for tag in _TAGS[:4])


@given(_CALLS, _TEXT.filter(_speech), st.booleans(), st.booleans())
def test_rendered_calls_are_read_back(calls: list[ToolCall], speech: str, ascii_only: bool, spaces: bool) -> None:
    separators = (", ", ": ") if spaces else (",", ":")
    blocks = [_block(call, ensure_ascii=ascii_only, separators=separators) for call in calls]
    turn = parse_hermes("\n".join([speech, *blocks]))
    if any("<tool_call>" in block[11:] or "</tool_call>" in block[:-12] for block in blocks):
        return  # an argument that holds a tag: test_a_tag_inside_a_value says what happens
    assert turn.malformed is None
    assert turn.calls == tuple(calls)
    assert turn.content == speech.strip()


@given(st.lists(st.sampled_from(_TAGS) | _TEXT).map("".join) | st.text())
def test_arbitrary_text_never_raises(text: str) -> None:
    turn = parse_hermes(text)
    assert not (turn.calls and turn.malformed)
    if turn.malformed is not None:
        assert 0 <= turn.malformed.position <= len(text)
        assert turn.malformed.detail
    # Whatever is read can be written again, to a file and to a server.
    json.dumps([call.arguments for call in turn.calls], ensure_ascii=False, allow_nan=False).encode()


GOOD = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "kind", "position"),
    [
        # Opens and closes are counted: a good call beside a cut one does not run either.
        (GOOD + '\n<tool_call>{"name": "f", "argu', "unterminated", len(GOOD) + 1),
        ("x<tool_call>" + GOOD, "unterminated", 1),
        ("abc</tool_call>", "stray_close", 3),
        (GOOD + "</tool_call>", "stray_close", len(GOOD)),
        ("<tool_call>{'name': 'f'}</tool_call>", "json", 11),
        ("<tool_call></tool_call>", "json", 11),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "json", 11),
        ("<tool_call>" + "9" * 5000 + "</tool_call>", "json", 11),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "json", 11),
        ('<tool_call>{"name": "f", "arguments": {"a": -1e999}}</tool_call>', "json", 11),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "json", 11),
        ('<tool_call>{"name": "f", "arguments": "{"}</tool_call>', "json", 11),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": NaN}"}</tool_call>', "json", 11),
        ("<tool_call>[]</tool_call>", "shape", 11),
        ('<tool_call>{"arguments": {}}</tool_call>', "shape", 11),
        ('<tool_call>{"name": ""}</tool_call>', "shape", 11),
        ('<tool_call>{"name": 3}</tool_call>', "shape", 11),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "shape", 11),
        ('<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>', "shape", 11),
    ],
)
def test_malformed_turns(text: str, kind: str, position: int) -> None:
    turn = parse_hermes(text)
    assert turn.malformed is not None
    assert (turn.malformed.kind, turn.malformed.position) == (kind, position)
    assert turn.calls == ()


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('"arguments": {"a":1,"b":2}', {"a": 1, "b": 2}),
        ('"arguments": {"b": 2, "a": 1}', {"a": 1, "b": 2}),
        ('"arguments": "{\\"a\\": 1}"', {"a": 1}),
        ('"arguments": ""', {}),
        ('"arguments": null', {}),
        ('"other": 1', {}),
        (
            '"arguments": {"v": "line\\nbreak, \\"quotes\\", $x and </parameter>"}',
            {"v": 'line\nbreak, "quotes", $x and </parameter>'},
        ),
    ],
)
def test_forms_of_arguments(written: str, arguments: dict[str, Any]) -> None:
    turn = parse_hermes('<tool_call>{"name": "f", ' + written + "}</tool_call>")
    assert turn.malformed is None
    assert turn.calls == (ToolCall("f", arguments),)


def test_a_tag_inside_a_value_is_an_error_and_not_a_wrong_value() -> None:
    turn = parse_hermes(_block(ToolCall("f", {"a": "x</tool_call>y"})))
    assert turn.malformed is not None and turn.calls == ()


def test_calls_inside_a_thought_do_not_run() -> None:
    turn = parse_hermes(f"\n<think>maybe {GOOD} or <tool_call></think>\n{GOOD}")
    assert turn.malformed is None
    assert turn.calls == (ToolCall("f", {"a": 1}),)
    assert turn.content == f"<think>maybe {GOOD} or <tool_call></think>"


def test_a_thought_that_never_closes_has_no_calls() -> None:
    turn = parse_hermes(f"<think>maybe {GOOD}")
    assert turn.calls == () and turn.malformed is None


def test_a_thought_elsewhere_is_text() -> None:
    assert parse_hermes(f"I <think> so. {GOOD}").calls == (ToolCall("f", {"a": 1}),)
