"""Whatever a model writes: no parser raises, positions lie in the text, results can be written, time is linear."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deskrl.tokens.parsing import FAMILIES, Outcome, ParsedTurn, parser_for

TAGS = {
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {', "}}", "[", '"'],
    "qwen_xml": ["<tool_call>", "</tool_call>", "<function=", "f>", "</function>", "<parameter=", "a>", "</parameter>"],
    "glm": ["<tool_call>", "f", "</tool_call>", "<arg_key>", "a", "</arg_key>", "<arg_value>", "</arg_value>"],
    "llama3": ["<|python_tag|>", '{"name": "f", "parameters": {', "}}", "{", "; ", "<|eot_id|>"],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "function<｜tool▁sep｜>f",
        "\n```json\n{}\n```",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ],
    "harmony": [
        "<|start|>",
        "assistant",
        "<|channel|>",
        "analysis",
        "commentary",
        "final",
        " to=functions.f",
        "<|constrain|>json",
        "<|message|>",
        "{}",
        "<|end|>",
        "<|call|>",
        "<|return|>",
    ],
}
TAGS["deepseek_v31"] = [tag.replace("function<", "<") for tag in TAGS["deepseek_v3"]]
TOOLS: dict[str, Any] = {
    "f": {
        "type": "object",
        "properties": {
            "a": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/tree"}]},
            "b": {"$ref": "#"},
            "c": {"type": "object"},
        },
        "$defs": {"tree": {"anyOf": [{"type": "array"}, {"$ref": "#/$defs/tree"}]}},
    }
}
VALUES = ["5", "1e999", "NaN", "[1]", '{"x": "\\ud800"}', "null", "\n", "<think>", "</think>", "<"]


def check(turn: ParsedTurn, text: str) -> None:
    found = [turn.malformed, turn.truncated, turn.inside_reasoning]
    assert (turn.outcome is Outcome.OK) == (found == [None] * 3)
    for each in found:
        if each is not None:
            assert not turn.calls
            assert 0 <= each.position <= len(text)
            assert each.detail
    for call in turn.calls:
        assert call.name
        # Whatever is read can be written again, to a file and to a server.
        json.dumps(call.arguments, ensure_ascii=False, allow_nan=False).encode()


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=300, deadline=None)
@given(data=st.data(), prefilled=st.booleans(), truncated=st.booleans())
def test_arbitrary_text_never_raises(family: str, data: st.DataObject, prefilled: bool, truncated: bool) -> None:
    piece = st.sampled_from(TAGS[family] * 3 + VALUES) | st.text(max_size=8)
    text = data.draw(st.lists(piece, max_size=30).map("".join) | st.text())
    parser = parser_for(family, prefilled_thought=prefilled)
    turn = parser.parse(text, TOOLS, truncated=truncated)
    check(turn, text)
    assert (turn.truncated is None) or truncated
    # The cap only ever explains what would otherwise be a broken turn: calls never depend on it.
    if not truncated and turn.outcome is Outcome.MALFORMED:
        assert not parser.parse(text, TOOLS, truncated=True).calls


@st.composite
def valid_turns(draw: st.DrawFn, family: str) -> str:
    number = draw(st.integers(1, 3))
    one = {
        "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        "qwen_xml": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "glm": "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
        "llama3": '{"name": "f", "parameters": {"a": 1}}',
        "deepseek_v3": '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>',
        "deepseek_v31": '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>',
        "harmony": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
    }[family]
    joint = {"llama3": "; ", "harmony": "<|start|>assistant"}.get(family, "\n")
    calls = joint.join([one] * number)
    return f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if family.startswith("deepseek") else calls


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_a_turn_cut_anywhere_runs_only_whole_calls(family: str, data: st.DataObject) -> None:
    text = data.draw(valid_turns(family))
    whole = parser_for(family).parse(text, TOOLS)
    assert whole.outcome is Outcome.OK and whole.calls
    cut = text[: data.draw(st.integers(0, len(text)))]
    turn = parser_for(family).parse(cut, TOOLS, truncated=True)
    check(turn, cut)
    assert turn.calls == whole.calls[: len(turn.calls)]
    if family != "harmony" and turn.outcome is Outcome.OK:
        assert turn.content == ""  # nothing of a cut call shows as a message


@pytest.fixture
def no_hang() -> Iterator[None]:
    """Ends a test that takes minutes: quadratic work on a megabyte takes hours, linear work a second."""

    def stop(*_: object) -> None:
        raise TimeoutError("a parser took longer than two minutes for a megabyte")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


PREFIXES = {
    "hermes": "<tool_call>",
    "qwen_xml": "<tool_call><function=f>",
    "glm": "<tool_call>f",
    "llama3": "<|python_tag|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>",
    "harmony": "<|channel|>final<|message|>",
}
# Valid pieces: here the scan goes on to the end, and every one of thousands of calls or messages counts.
REPEATED = {
    "hermes": ('<tool_call>{"name": "f"}</tool_call>', "<tool_call>{}</tool_call>", "<tool_call> "),
    "qwen_xml": ("<tool_call><function=f></function></tool_call>", "<tool_call><function=f>", "\n"),
    "glm": ("<tool_call>f</tool_call>", "<tool_call>f<arg_key>", " "),
    "llama3": ('{"name": "f", "parameters": {}};', '{"a": 1}', "{} "),
    "deepseek_v3": (
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>",
        "\n```json\n",
        "`",
    ),
    "deepseek_v31": ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "{"),
    "harmony": (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant",
        "<|channel|>commentary to=functions.f<|message|>{}<|call|><|start|>assistant",
        " to=functions.f",
    ),
}


@pytest.mark.usefixtures("no_hang")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_megabyte_of_one_piece_ends(family: str) -> None:
    pieces = [*TAGS[family], *REPEATED[family], "<think>", "</think>", "<", "{", "\\", "<|"]
    for piece in pieces:
        text = piece * (1_000_000 // len(piece))
        for prefix in ("", PREFIXES[family]):
            check(parser_for(family).parse(prefix + text, TOOLS), prefix + text)
            check(parser_for(family).parse(prefix + text, TOOLS, truncated=True), prefix + text)


@pytest.mark.usefixtures("no_hang")
def test_a_megabyte_of_arguments_is_read() -> None:
    number = 20_000
    pairs = "".join(f"<parameter=k{n}>\n{n}\n</parameter>\n" for n in range(number))
    turn = parser_for("qwen_xml").parse(f"<tool_call>\n<function=f>\n{pairs}</function>\n</tool_call>", TOOLS)
    assert len(turn.calls[0].arguments) == number
    pairs = "".join(f"<arg_key>k{n}</arg_key><arg_value>{n}</arg_value>" for n in range(number))
    turn = parser_for("glm").parse(f"<tool_call>f{pairs}</tool_call>", TOOLS)
    assert turn.calls[0].arguments["k7"] == 7


@pytest.mark.usefixtures("no_hang")
def test_a_schema_of_references_into_each_other_is_typed_once() -> None:
    definitions: dict[str, Any] = {
        f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]} for n in range(30)
    }
    definitions["d30"] = {"type": "integer"}
    tool = {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": definitions}
    text = "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    assert parser_for("glm").parse(text, {"f": tool}).calls[0].arguments == {"a": 1}
