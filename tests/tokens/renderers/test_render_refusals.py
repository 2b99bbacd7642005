"""Templates that no renderer may guess at: each is refused at the start, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from render_models import TEMPLATES, model

from deskrl.tokens import ChatTokenizer, RendererError
from deskrl.tokens.check import check_model
from deskrl.tokens.renderers import renderer_for

_PLAIN = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + $CONTENT + '<|im_end|>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"
)
_QWEN3 = (TEMPLATES / "qwen3.jinja").read_text()


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        pytest.param(_PLAIN.replace("$CONTENT", "m.content | upper"), "changes", id="rewrites contents"),
        pytest.param(
            _PLAIN.replace("$CONTENT", "m.content") + "{{ messages | length }}", "not a function of", id="counts turns"
        ),
        pytest.param(
            "{%- for m in messages -%}{{ m.role + ': ' + m.content + '\\n' }}{%- endfor -%}"
            "{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif -%}",
            "no control token ends an answer",
            id="no control tokens",
        ),
        pytest.param(
            "{{ messages | length }}" + _PLAIN.replace("$CONTENT", "m.content"),
            "not append-only",
            id="rewrites the past",
        ),
        pytest.param(
            _PLAIN.replace("$CONTENT", "(m.content if loop.index0 > messages | length - 3 else m.content[:3])"),
            "not append-only|changes",
            id="shortens the past",
        ),
        pytest.param(
            _QWEN3.replace("{{ '\\n<tool_response>\\n' + m.content", "{{ '\\n<tool_response>\\n' + m.content[:9]"),
            "changes a tool result|renders tool definitions but no tool call",
            id="cuts tool results",
        ),
        pytest.param(
            _QWEN3.replace(
                "'\\n<tool_response>\\n' + m.content", "'\\n<tool_response>\\n' + m.tool_call_id + m.content"
            ),
            "call ids",
            id="writes call ids",
        ),
        pytest.param(
            _QWEN3.replace("'\\n<tool_response>\\n'", "'\\n<tool_response>\\n' + (loop.index | string) + ' '"),
            "different ways|not a function of",
            id="numbers tool results",
        ),
        pytest.param("{{ raise_exception('not today') }}", "not today", id="refuses everything"),
    ],
)
def test_an_unfit_template_is_refused(tiny: Path, template: str, reason: str) -> None:
    tokenizer = model(tiny, "qwen3", template)
    with pytest.raises(RendererError, match=reason):
        renderer_for(tokenizer, "generic")
    found = check_model(tokenizer)
    assert not all(finding.ok for finding in found)
    assert all(finding.fix for finding in found if not finding.ok)


def test_tokens_that_merge_over_a_boundary_are_seen(tiny: Path) -> None:
    # A token that swallows the whitespace before it: pieces and the full render disagree.
    tokenizer = model(tiny, "qwen3")
    definition = tokenizer._template_encoder.to_str().replace(
        '"content":"</tool_response>","single_word":false,"lstrip":false',
        '"content":"</tool_response>","single_word":false,"lstrip":true',
    )
    swallowing = ChatTokenizer(definition, tokenizer.chat_template, tokenizer.special_tokens)
    with pytest.raises(RendererError, match="merge over a boundary"):
        renderer_for(swallowing, "generic")


def test_a_family_is_not_forced_on_another_model(load: Callable[[str], ChatTokenizer]) -> None:
    with pytest.raises(RendererError, match=r"no control token '<\|user\|>'"):
        renderer_for(load("qwen3"), "glm")
    with pytest.raises(RendererError, match="chatml is for hermes"):
        renderer_for(load("qwen35"), "chatml")
    with pytest.raises(RendererError, match="there are auto"):
        renderer_for(load("qwen3"), "qwen4")
