"""The typed outcomes, family by family: conformance cases 5, 12, 13 and 14, kinds, positions and thoughts."""

from __future__ import annotations

from typing import Any

import pytest

from deskrl.tokens.parsing import (
    FAMILIES,
    Malformed,
    Outcome,
    ParsedTurn,
    ToolCall,
    Truncated,
    parser_for,
    split_reasoning,
)

TOOLS: dict[str, Any] = {"f": {"type": "object", "properties": {"v": {"type": "string"}, "n": {"type": "integer"}}}}
CALL = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"v": "x"}}\n</tool_call>',
    "qwen_xml": "<tool_call>\n<function=f>\n<parameter=v>\nx\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>f\n<arg_key>v</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
    "llama3": '<|python_tag|>{"name": "f", "parameters": {"v": "x"}}',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"v": "x"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"v": "x"}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "harmony": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"v": "x"}<|call|>',
}
CALLS = (ToolCall("f", {"v": "x"}),)
THINKING = [family for family in FAMILIES if family != "harmony"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_is_read_with_and_without_the_cap(family: str) -> None:
    # Case 4: the cap may fall just behind a whole call, which then runs.
    for truncated in (False, True):
        assert parser_for(family).parse(CALL[family], TOOLS, truncated=truncated) == ParsedTurn("", CALLS)


@pytest.mark.parametrize("family", THINKING)
def test_case_5_a_turn_cut_in_its_thought_is_truncated(family: str) -> None:
    turn = parser_for(family).parse("\n<think>Let me", TOOLS, truncated=True)
    assert (turn.outcome, turn.reasoning, turn.content) == (Outcome.TRUNCATED, "Let me", "")
    assert turn.truncated is not None and turn.truncated.position == 1
    turn = parser_for(family, prefilled_thought=True).parse("Let me", TOOLS, truncated=True)
    assert turn.truncated is not None and turn.truncated.position == 0
    # Not even with a whole call in the thought: what the model would have said about it is not known.
    turn = parser_for(family).parse("<think>" + CALL[family], TOOLS, truncated=True)
    assert (turn.outcome, turn.calls) == (Outcome.TRUNCATED, ())


@pytest.mark.parametrize("family", THINKING)
def test_case_5_a_turn_that_ends_in_its_thought_by_itself_is_inside_reasoning(family: str) -> None:
    turn = parser_for(family).parse("<think>Let me", TOOLS)
    assert turn.inside_reasoning is not None and turn.inside_reasoning.position == 0
    assert (turn.outcome, turn.reasoning) == (Outcome.INSIDE_REASONING, "Let me")


@pytest.mark.parametrize("family", THINKING)
def test_case_13_a_call_in_a_closed_thought_is_thought(family: str) -> None:
    for prefilled, opening in ((False, "<think>"), (True, ""), (True, "<think>")):
        parser = parser_for(family, prefilled_thought=prefilled)
        text = f"{opening}maybe {CALL[family]}\n</think>\n\nNow.\n{CALL[family]}"
        assert parser.parse(text, TOOLS) == ParsedTurn("Now.", CALLS, reasoning=f"maybe {CALL[family]}")


@pytest.mark.parametrize("family", THINKING)
def test_case_13_a_call_in_an_open_thought_does_not_run_and_is_pointed_at(family: str) -> None:
    turn = parser_for(family).parse(f"<think>maybe {CALL[family]}", TOOLS)
    assert (turn.outcome, turn.calls) == (Outcome.INSIDE_REASONING, ())
    assert turn.inside_reasoning is not None and turn.inside_reasoning.position == len("<think>maybe ")


def test_case_5_harmony_thoughts_that_do_not_end() -> None:
    text = "<|channel|>analysis<|message|>Let me"
    turn = parser_for("harmony").parse(text, TOOLS)
    assert (turn.outcome, turn.reasoning) == (Outcome.INSIDE_REASONING, "Let me")
    turn = parser_for("harmony").parse(text, TOOLS, truncated=True)
    assert (turn.outcome, turn.reasoning) == (Outcome.TRUNCATED, "Let me")


def test_case_16_harmony_keeps_thought_message_and_call_apart() -> None:
    analysis = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    turn = parser_for("harmony").parse(analysis + preamble + CALL["harmony"], TOOLS)
    assert turn == ParsedTurn("I look.", CALLS, reasoning="Hm.")
    final = "<|channel|>final<|message|>Done.<|return|>"
    assert parser_for("harmony").parse(analysis + final, TOOLS) == ParsedTurn("Done.", reasoning="Hm.")


@pytest.mark.parametrize("family", ["hermes", "qwen_xml", "glm"])
def test_case_12_one_whole_call_and_one_without_its_close(family: str) -> None:
    whole = CALL[family]
    text = f"{whole}\n{whole.removesuffix('</tool_call>')}"
    turn = parser_for(family).parse(text, TOOLS)
    assert turn == ParsedTurn(
        "", malformed=Malformed("unterminated", len(whole) + 1, "<tool_call> without </tool_call>")
    )
    cut = parser_for(family).parse(text, TOOLS, truncated=True)
    assert (cut.calls, cut.truncated and cut.truncated.position) == ((), len(whole) + 1)
    # The cap does not excuse an opening that another one follows.
    assert parser_for(family).parse("<tool_call>" + whole, TOOLS, truncated=True).outcome is Outcome.MALFORMED


VALUES = ["a\nb", "\n a \n", 'say "x"', "it's", "$HOME", "a </parameter", "</arg_value", "<b>&amp;</b>", "\\n", "{}"]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("family", ["qwen_xml", "glm"])
def test_case_14_difficult_values_are_read_as_they_are(family: str, value: str) -> None:
    written = CALL[family].replace("\nx\n", f"\n{value}\n").replace(">x<", f">{value}<")
    assert parser_for(family).parse(written, TOOLS) == ParsedTurn("", (ToolCall("f", {"v": value}),))


@pytest.mark.parametrize(
    ("family", "value"),
    [("qwen_xml", tag) for tag in ("</parameter>", "<parameter=n>", "</function>", "<function=f>")]
    + [("glm", tag) for tag in ("</arg_value>", "<arg_value>", "<arg_key>", "</arg_key>")]
    + [(family, tag) for family in ("qwen_xml", "glm") for tag in ("<tool_call>", "</tool_call>")],
)
def test_case_14_a_value_with_the_familys_tags_is_an_error_not_a_wrong_value(family: str, value: str) -> None:
    value = f"a{value}b"
    written = CALL[family].replace("\nx\n", f"\n{value}\n").replace(">x<", f">{value}<")
    turn = parser_for(family).parse(written, TOOLS)
    assert (turn.outcome, turn.calls) == (Outcome.MALFORMED, ())


@pytest.mark.parametrize(
    ("family", "text", "kind", "at"),
    [
        ("hermes", "a <tool_call>{</tool_call>", "json", "{<"),
        ("hermes", "a </tool_call>", "stray_close", "</tool_call>"),
        ("qwen_xml", "a <parameter=v>", "stray", "<parameter"),
        ("qwen_xml", "<tool_call> {}</tool_call>", "shape", "{}"),
        ("qwen_xml", "<tool_call><function=></function></tool_call>", "name", "<function"),
        ("qwen_xml", "<tool_call><function=f></tool_call>", "unterminated", "</tool_call>"),
        ("qwen_xml", "<tool_call><function=f><parameter=v>x</function></tool_call>", "unterminated", "<parameter"),
        ("qwen_xml", "<tool_call><function=f><parameter=n>x</parameter></function></tool_call>", "type", "x</"),
        ("qwen_xml", "<tool_call><function=f></function>x</tool_call>", "shape", "x</"),
        ("glm", "<tool_call> </tool_call>", "name", " </"),
        ("glm", "<tool_call>f<arg_key>n</arg_key><arg_value>x</arg_value></tool_call>", "type", "x</"),
        ("glm", "<tool_call>f<arg_key>n</arg_key>x</tool_call>", "shape", "x</"),
        ("glm", "<tool_call>f<arg_key>n</tool_call>", "unterminated", "<arg_key>"),
        ("llama3", 'So: {"name": "f", "parameters": [}', "json", "{"),
        ("llama3", "a <|python_tag|>b", "shape", "<|python_tag|>"),
        ("llama3", '{"name": "f", "parameters": {}}; {"a": 1}', "shape", '{"a"'),
        ("deepseek_v3", "a<｜tool▁sep｜>", "stray", "<｜tool▁sep｜>"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>x", "shape", "x"),
        ("harmony", "Hello.", "unterminated", "Hello."),
        ("harmony", "<|channel|>other<|message|>x<|end|>", "shape", "<|channel|>"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>[]<|call|>", "shape", "[]"),
        ("harmony", "<|channel|>commentary to=python<|message|>1<|call|>", "recipient", "<|channel|>"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>{}<|end|>", "unterminated", "<|channel|>"),
        ("harmony", "<|channel|>final<|message|>x<|call|>", "recipient", "<|channel|>"),
        ("harmony", "<|channel|>final<|message|>x<|end|>y<|message|>z<|end|>", "shape", "y"),
    ],
)
def test_malformed_turns_say_what_and_where(family: str, text: str, kind: str, at: str) -> None:
    malformed = parser_for(family).parse(text, TOOLS).malformed
    assert malformed is not None
    assert (malformed.kind, malformed.position) == (kind, text.index(at))


@pytest.mark.parametrize(
    ("family", "stop"),
    [
        ("hermes", "<|im_end|>"),
        ("qwen_xml", "<|im_end|>\n"),
        ("glm", "<|observation|>"),
        ("glm", "<|user|>"),
        ("llama3", "<|eom_id|>"),
        ("llama3", "<|eot_id|>"),
        ("deepseek_v3", "<｜end▁of▁sentence｜>"),
        ("deepseek_v31", "<｜end▁of▁sentence｜>"),
    ],
)
def test_a_stop_token_at_the_end_is_no_content(family: str, stop: str) -> None:
    assert parser_for(family).parse(CALL[family] + stop, TOOLS) == ParsedTurn("", CALLS)
    assert parser_for(family).parse("Hi." + stop, TOOLS) == ParsedTurn("Hi.")


@pytest.mark.parametrize("text", ['{"answer": 42}', '{"name": "Bob", "age": 3}', "Use {x} here.", "{", "[1]"])
def test_llama_answers_that_hold_json_are_no_calls(text: str) -> None:
    assert parser_for("llama3").parse(text, TOOLS) == ParsedTurn(text)


def test_a_hermes_model_on_the_qwen_parser_is_malformed_and_not_silent() -> None:
    # Case 15 is refused at start-up; were it not, every turn would say so.
    assert parser_for("qwen_xml").parse(CALL["hermes"], TOOLS).outcome is Outcome.MALFORMED
    assert parser_for("hermes").parse(CALL["qwen_xml"], TOOLS).outcome is Outcome.MALFORMED
    assert parser_for("glm").parse(CALL["qwen_xml"], TOOLS).outcome is Outcome.MALFORMED


@pytest.mark.parametrize(
    ("text", "prefilled", "reasoning", "rest"),
    [
        ("Hi.", False, None, "Hi."),
        ("<think>a</think>b", False, "a", "b"),
        ("\n<think>\n\n</think>\n\nb", False, "", "\n\nb"),
        ("a\n</think>\n\nb", True, "a", "\n\nb"),
        ("<think>a</think>b", True, "a", "b"),
        ("</think>b", True, "", "b"),
        ("a</think>b", False, None, "a</think>b"),
        ("x <think>a</think>b", False, None, "x <think>a</think>b"),
        ("<think>a<think>b</think>c</think>d", False, "a<think>b", "c</think>d"),
    ],
)
def test_thoughts_are_split_off(text: str, prefilled: bool, reasoning: str | None, rest: str) -> None:
    split = split_reasoning(text, prefilled=prefilled)
    assert (split.reasoning, text[split.rest :], split.unclosed) == (reasoning, rest, None)


def test_a_turn_has_one_outcome() -> None:
    with pytest.raises(ValueError, match="either calls or one reason"):
        ParsedTurn("", CALLS, truncated=Truncated(0, "cut"))


def test_an_unknown_family_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no tool-call parser for family 'mystery'; there are hermes"):
        parser_for("mystery")
