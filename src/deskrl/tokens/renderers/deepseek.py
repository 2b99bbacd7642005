"""DeepSeek-V3 and its successors.

Later templates (V3.1) derive like any other. The first one forgets: it frames tool results
(`<｜tool▁outputs▁begin｜>` ... `<｜tool▁outputs▁end｜>`) and ends a turn of calls properly only for two calls in the
first turn. What it writes there is what the model was trained on, so every turn gets that here, and the proof
covers that turn, prompts and user turns.
"""

from __future__ import annotations

from deskrl.tokens.chat import ChatTokenizer
from deskrl.tokens.renderers.base import RendererError
from deskrl.tokens.renderers.derive import derive
from deskrl.tokens.renderers.families import DEEPSEEK_V3
from deskrl.tokens.renderers.forms import Forms, ResultForm, UserForm
from deskrl.tokens.renderers.generic import TemplateRenderer
from deskrl.tokens.renderers.probe import KEY, NAME, VALUE
from deskrl.tokens.renderers.prove import prove

_END = "<｜end▁of▁sentence｜>"
_V3 = Forms(
    end=_END,
    call_end=_END,
    after_end="",
    ends=frozenset({_END}),
    result=ResultForm(
        before="<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>",
        between="<｜tool▁output▁end｜>\n<｜tool▁output▁begin｜>",
        after="<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
    ),
    user=UserForm("<｜User｜>", "<｜Assistant｜>"),
    reasoning=DEEPSEEK_V3.reasoning,
    prefill="",
    template_tools=False,
    template_calls=True,
    call_example=(
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n"
        f'```json\n{{"{KEY}": "{VALUE}"}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    call_content=None,
    arguments_as_text=True,
)


class DeepSeekRenderer(TemplateRenderer):
    """The generic renderer, with V3's forms where its template does not show them."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        try:
            self._set(tokenizer, DEEPSEEK_V3, derive(tokenizer, DEEPSEEK_V3))
        except RendererError as refused:
            if not set(DEEPSEEK_V3.needs) <= set(tokenizer.control_tokens):
                raise
            self._set(tokenizer, DEEPSEEK_V3, _V3)
            try:
                self.notes = prove(tokenizer, self.forms, first_results_only=True)
            except RendererError as error:
                raise RendererError(f"{refused}; and as DeepSeek-V3: {error}") from error
        else:
            self.notes = prove(tokenizer, self.forms)
