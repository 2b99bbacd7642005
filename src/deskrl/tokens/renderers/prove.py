"""Proves derived forms on conversations they were not derived from.

Two properties. A tail built from the forms has the text and the ids that a full render ends with, at every turn,
whatever the contents and however many results. And the template only appends: what it rendered before a turn is
how the next render starts. A template that drops earlier reasoning breaks the second one harmlessly, because
sampled ids are kept: that is noted. Anything else is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from deskrl.tokens.chat import ChatTemplateError, ChatTokenizer, Message, Piece, Trust
from deskrl.tokens.renderers import probe
from deskrl.tokens.renderers.base import RendererError
from deskrl.tokens.renderers.forms import Forms
from deskrl.tokens.renderers.probe import Dialect

_THOUGHT_DROPPED = "only the opened reasoning is dropped: "
CONTENTS = ("plain", "  Ünï 好\n\n", "", '{"a": [1, 2.5]}', "\ttrail\r\n", "👩‍💻\n- x", "1,234\n")


def prove(tokenizer: ChatTokenizer, forms: Forms, *, first_results_only: bool = False) -> tuple[str, ...]:
    """What is worth knowing about the template.

    Args:
        first_results_only: the template renders the results of two calls in the first turn right, and no others.

    Raises:
        RendererError: a probe shows other text or other ids than the forms give.
    """
    dialect = Dialect(True, forms.call_content, forms.arguments_as_text)
    try:
        probe.render(tokenizer, dialect.start(), False)
    except ChatTemplateError:
        dialect = Dialect(False, forms.call_content, forms.arguments_as_text)
    try:
        return tuple(_Proof(tokenizer, forms, dialect, first_results_only).notes())
    except ChatTemplateError as error:
        raise RendererError(f"the chat template does not render a probe conversation: {error}") from error


class _Proof:
    def __init__(self, tokenizer: ChatTokenizer, forms: Forms, dialect: Dialect, first_results_only: bool) -> None:
        self.tokenizer = tokenizer
        self.forms = forms
        self.dialect = dialect
        self.first_results_only = first_results_only

    def notes(self) -> list[str]:
        """Checks everything; returns the template's peculiarities."""
        found = []
        forms = self.forms
        for tools in (False, True):
            self._prompt(tools and forms.template_tools)
        for reasoning in (False, True):
            self._user_turns(reasoning)
            if forms.template_calls:
                self._result_turns(reasoning)
        if not forms.template_tools:
            found.append("the template renders no tool definitions: they go into the system turn")
        if not forms.template_calls:
            found.append("the template renders no tool results: they go into user turns")
        if self.first_results_only:
            found.append("the template frames tool results in the first turn only; here every turn has the frame")
        else:
            breaks = [self._rewritten(reasoning, then_user=False) for reasoning in (False, True)]
            if all(breaks) and not all(why.startswith(_THOUGHT_DROPPED) for why in breaks):
                raise RendererError(f"the template is not append-only: {breaks[0]}")
            if breaks[True] and (forms.shows_reasoning or all(breaks)):
                found.append("the template drops reasoning within a chain of tool calls; sampled ids are kept")
        later = self._rewritten(forms.shows_reasoning, then_user=True)
        if later and not forms.shows_reasoning and not later.startswith(_THOUGHT_DROPPED):
            raise RendererError(f"the template is not append-only: {later}")
        if later:
            found.append("the template drops earlier reasoning when a user message follows; sampled ids are kept")
        for what, transform in (("tool results", forms.result.transform), ("user messages", forms.user.transform)):
            if transform != "as it is":
                found.append(f"the template writes {what} {transform}")
        return found

    def _prompt(self, tools: bool) -> None:
        messages = self.dialect.start()
        given = [probe.TOOL] if tools else None
        ours = self.tokenizer.encode_conversation(messages, tools=given, add_generation_prompt=True)
        self._same(ours, probe.render(self.tokenizer, messages, tools), "a prompt")

    def _user_turns(self, reasoning: bool) -> None:
        for tools in {False, self.forms.template_tools}:
            messages = self.dialect.start()
            for content in CONTENTS:
                messages = [*messages, self.dialect.answer(reasoning), probe.user(content)]
                what = f"the user message {content!r}"
                self._tail(messages, tools, self.forms.end, self.forms.user.pieces(content), what)

    def _result_turns(self, reasoning: bool) -> None:
        messages = self.dialect.start()
        for number, content in enumerate(CONTENTS):
            count = 2 if self.first_results_only else 1 + number % 3
            texts = [*CONTENTS[number:], *CONTENTS[:number]][:count]
            messages = probe.with_results(self.tokenizer, self.dialect, messages, texts, reasoning)
            pieces = self.forms.result.pieces(texts, [probe.NAME] * len(texts))
            self._tail(messages, True, self.forms.call_end, pieces, f"turn {number} with the tool results {texts}")
            if self.first_results_only:
                return
            if number == 3:  # an answer and a question in between must not change what follows
                messages = [*messages, self.dialect.answer(reasoning), probe.user(content)]
                new = self.forms.user.pieces(content)
                self._tail(messages, True, self.forms.end, new, "a user message after tool results")

    def _tail(self, messages: Sequence[Message], tools: bool, end: str, new: Sequence[Piece], what: str) -> None:
        """A full render ends with the tail, in text and in ids."""
        full = probe.render(self.tokenizer, messages, tools)
        pieces = [(end + self.forms.after_end, Trust.TEMPLATE), *new]
        tail = "".join(text for text, _ in pieces)
        if not full.endswith(tail):
            raise RendererError(
                f"the template's text is not a function of the new messages: for {what} it ends with "
                f"{full[-len(tail) - 20 :]!r}, expected was {tail!r}"
            )
        before = full[: -len(tail)]
        ours = self.tokenizer.encode_template(before) + self.tokenizer.encode_pieces(pieces)
        self._same(ours, full, what)

    def _same(self, ours: list[int], text: str, what: str) -> None:
        rendered = self.tokenizer.encode_template(text)
        if ours == rendered:
            return
        pairs = enumerate(zip(rendered, ours, strict=False))
        same = next((n for n, (a, b) in pairs if a != b), min(len(rendered), len(ours)))
        decode = self.tokenizer.decode
        raise RendererError(
            f"tokens merge over a boundary of this template: {what} renders to {len(rendered)} ids, in pieces to "
            f"{len(ours)}; from id {same} on {decode(rendered[same:])[:60]!r} against {decode(ours[same:])[:60]!r}"
        )

    def _rewritten(self, reasoning: bool, *, then_user: bool) -> str:
        """Where a longer conversation changes what a shorter one rendered; "" where it only appends."""
        tools = self.forms.template_calls
        steps = [self.dialect.start()]
        for texts in (["one"], ["two", "three"], ["four"]):
            if tools and not self.first_results_only:
                steps.append(probe.with_results(self.tokenizer, self.dialect, steps[-1], texts, reasoning))
        if then_user:
            steps.append([*steps[-1], self.dialect.answer(reasoning), probe.user("and then?")])
            steps.append([*steps[-1], self.dialect.answer(reasoning), probe.user("and now?")])
        texts_of = [probe.render(self.tokenizer, step, tools) for step in steps]
        for shorter, longer in pairwise(texts_of):
            if not longer.startswith(shorter):
                dropped = longer.startswith(shorter.removesuffix(self.forms.prefill)) and self.forms.prefill
                at = next(n for n, (a, b) in enumerate(zip(shorter + "\0", longer, strict=False)) if a != b)
                return (_THOUGHT_DROPPED if dropped else "") + (
                    f"a longer conversation turns {shorter[max(0, at - 20) : at + 30]!r} into "
                    f"{longer[max(0, at - 20) : at + 30]!r}"
                )
        return ""
