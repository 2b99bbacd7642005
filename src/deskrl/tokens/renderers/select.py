"""Picks a renderer for a tokenizer and proves it, or says why none fits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from deskrl.tokens.chat import ChatTemplateError, ChatTokenizer
from deskrl.tokens.renderers.base import RendererError
from deskrl.tokens.renderers.deepseek import DeepSeekRenderer
from deskrl.tokens.renderers.families import CHATML, DEEPSEEK_V3, FAMILIES, GENERIC, GLM, HARMONY, LLAMA3, QWEN_XML
from deskrl.tokens.renderers.generic import TemplateRenderer
from deskrl.tokens.renderers.harmony import HarmonyRenderer
from deskrl.tokens.renderers.probe import Dialect, render, user

_OWN_CODE: dict[str, Callable[[ChatTokenizer], TemplateRenderer]] = {
    HARMONY.name: HarmonyRenderer,
    DEEPSEEK_V3.name: DeepSeekRenderer,
}


def renderer_for(tokenizer: ChatTokenizer, family: str = "auto") -> TemplateRenderer:
    """The renderer of a family, proved on the tokenizer's chat template.

    Args:
        family: a name in `FAMILIES`, or `auto`: the first family whose control tokens the model has and its
            template uses and whose proof succeeds, at last the generic renderer.

    Raises:
        RendererError: no such family, or the proof failed; the message holds each reason.
    """
    if family != "auto":
        if family not in FAMILIES:
            raise RendererError(f"no renderer family {family!r}: there are auto, {', '.join(FAMILIES)}")
        return _make(tokenizer, family)
    reasons: dict[str, str] = {}
    written = _conversation(tokenizer)
    for tried in (HARMONY, DEEPSEEK_V3, LLAMA3, GLM, CHATML, QWEN_XML, GENERIC):
        # The first two are those that every template of the family writes in any conversation.
        used = all(token in written for token in tried.needs[:2])
        if used and set(tried.needs) <= set(tokenizer.control_tokens):
            try:
                return _make(tokenizer, tried.name)
            except RendererError as error:
                reasons[tried.name] = str(error)
    told = "; ".join(f"as {name}: {reason}" for name, reason in reasons.items())
    raise RendererError(f"no renderer fits this model: {told}")


def _conversation(tokenizer: ChatTokenizer) -> str:
    """What the template makes of a conversation without tools; "" if it takes none."""
    for dialect in (Dialect(), Dialect(system=False)):
        with contextlib.suppress(ChatTemplateError):
            return render(tokenizer, [*dialect.start(), dialect.answer(), user("")], False)
    return ""


def _make(tokenizer: ChatTokenizer, family: str) -> TemplateRenderer:
    if family in _OWN_CODE:
        return _OWN_CODE[family](tokenizer)
    return TemplateRenderer(tokenizer, FAMILIES[family])
