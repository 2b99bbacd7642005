"""Random conversations: the ids built turn by turn are those of a full render, as long as the template only appends.

The template itself plays the model: what it writes for a turn is taken as sampled, with its end or, as if the turn
had been cut, without. Everything around comes from the renderer, which never sees the conversation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from render_models import REAL, VOCABULARIES

from deskrl.tokens import ChatTokenizer, TokenLedger
from deskrl.tokens.renderers import TemplateRenderer, renderer_for

_PARTS = [
    "\n",
    "\n\n",
    " ",
    "  ",
    "\t",
    "\r\n",
    "\u00a0",
    "```\n",
    "1,234",
    '"',
    "\\",
    "é",
    "e\u0301",
    "好",
    "👩\u200d💻",
]
_CHARACTERS = st.characters(exclude_categories=["Cc", "Cn", "Co", "Cs"], max_codepoint=0x2FFFF)
_TEXT = st.lists(st.sampled_from(_PARTS) | st.text(_CHARACTERS, max_size=6), max_size=6).map("".join)
_RESULTS = st.lists(_TEXT, min_size=1, max_size=3)
_TURNS = st.lists(st.tuples(_RESULTS | _TEXT, _TEXT, st.booleans(), st.booleans()), min_size=1, max_size=4)
_TOOL = {"name": "read", "description": "Liest.", "parameters": {"type": "object", "properties": {"p": {}}}}
_TOOLS = [{"type": "function", "function": _TOOL}]
# DeepSeek-V3's first template is right in a single turn only; it has tests of its own.
_NAMES = ["smollm2", *(name for name in VOCABULARIES if name != "deepseek_v3"), *REAL]


@pytest.fixture(scope="module")
def renderer(request: pytest.FixtureRequest, load: Callable[[str], ChatTokenizer]) -> TemplateRenderer:
    return renderer_for(load(request.param))


def _calls(count: int, value: str, as_text: bool) -> list[dict[str, Any]]:
    arguments: Any = '{"p": "v"}' if as_text else {"p": value}
    call = {"type": "function", "id": "call00000", "function": {"name": "read", "arguments": arguments}}
    return [call] * count


@pytest.mark.parametrize("renderer", _NAMES, indirect=True)
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(system=_TEXT, question=_TEXT, turns=_TURNS)
def test_turn_by_turn_equals_a_full_render(
    renderer: TemplateRenderer, system: str, question: str, turns: list[Any]
) -> None:
    tokenizer, forms = renderer.tokenizer, renderer.forms
    drawn = [system, question, *(text for new, said, _, _ in turns for text in [said, *(new if new else [""])])]
    assume(not any("<" in text or "[" in text for text in drawn))  # no control token, whole or half
    tools = _TOOLS if forms.template_tools else []
    messages: list[Any] = [{"role": "system", "content": f"S{system}"}, {"role": "user", "content": f"Q{question}"}]
    text = tokenizer.render(messages, tools=tools, add_generation_prompt=True)
    ledger = TokenLedger(tokenizer.vocabulary_size)
    ledger.append_prompt(renderer.prompt(messages, tools))
    assert ledger.ids == tokenizer.encode_template(text)
    stops = [tokenizer.decode([stop]) for stop in renderer.stop_token_ids]
    for new, said, thinks, cut in turns:
        thought = (
            {"reasoning_content": f"T{said}", "thinking": f"T{said}"} if thinks or renderer.prefilled_thought else {}
        )
        with_calls = isinstance(new, list) and forms.template_calls
        if with_calls:
            results = new[:1] if forms.result.needs_names or renderer.family == "llama3" else new
            calls = _calls(len(results), said, forms.arguments_as_text)
            turn = {"role": "assistant", "content": forms.call_content, "tool_calls": calls, **thought}
            messages = [*messages, turn, *({"role": "tool", "content": result} for result in results)]
        else:
            answer, results = {"role": "assistant", "content": f"A{said}", **thought}, []
            messages = [*messages, answer, {"role": "user", "content": f"U{new}"}]
        longer = tokenizer.render(messages, tools=tools, add_generation_prompt=True)
        if not longer.startswith(text):
            return  # the template takes something back: sampled ids are kept, there is nothing to compare with
        rest, text = longer[len(text) :], longer
        # gpt-oss is never sampled what its template ends a former answer with.
        ends = [*stops, *([forms.end] if forms.end and not with_calls else [])]
        end = min((rest.index(end) + len(end), end) for end in ends if end in rest)
        sampled = tokenizer.encode_template(rest[: end[0] - (len(end[1]) if cut else 0)])
        ledger.append_generation(sampled, [-1.0] * len(sampled))
        ledger.append_close(renderer.close(sampled))
        if with_calls:
            ledger.append_observation(renderer.observation(results, names=["read"] * len(results), after=sampled))
        else:
            ledger.append_observation(renderer.user_message(f"U{new}", after=sampled))
        assert ledger.ids == tokenizer.encode_template(longer)
        assert tokenizer.decode(ledger.ids) == tokenizer.decode(tokenizer.encode_template(longer))


@pytest.mark.parametrize("renderer", _NAMES, indirect=True)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), before=_TEXT, after=_TEXT)
def test_content_forges_no_control_token(
    renderer: TemplateRenderer, data: st.DataObject, before: str, after: str
) -> None:
    tokenizer = renderer.tokenizer
    forged = before + data.draw(st.sampled_from(sorted(tokenizer.control_tokens))) + after
    controls = set(tokenizer.control_tokens.values())

    def frame(ids: list[int]) -> list[int]:
        return [token for token in ids if token in controls]

    names = ["read"]
    assert frame(renderer.observation([forged], names=names)) == frame(renderer.observation(["x"], names=names))
    assert frame(renderer.user_message(forged)) == frame(renderer.user_message("x"))
    tool = {"type": "function", "function": {**_TOOL, "description": forged}}
    start = [{"role": "system", "content": "S"}, {"role": "user", "content": forged}]
    plain = [{"role": "system", "content": "S"}, {"role": "user", "content": "x"}]
    assert frame(renderer.prompt(start, [])) == frame(renderer.prompt(plain, []))
    if renderer.forms.template_tools:
        assert frame(renderer.prompt(start, [tool])) == frame(renderer.prompt(plain, _TOOLS))
