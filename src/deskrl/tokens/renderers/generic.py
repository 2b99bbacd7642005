"""A renderer derived from a chat template, and proved on it before it is used.

The families differ only in what `families` states of them; their texts come from the model's own template, so
that a new revision of a template needs no new code, or is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from deskrl.tokens.chat import ChatTokenizer, Message, Trust
from deskrl.tokens.renderers.base import RendererError
from deskrl.tokens.renderers.derive import derive
from deskrl.tokens.renderers.families import GENERIC, Family
from deskrl.tokens.renderers.forms import Forms
from deskrl.tokens.renderers.preamble import with_tool_preamble
from deskrl.tokens.renderers.probe import KEY, NAME, VALUE
from deskrl.tokens.renderers.prove import prove
from deskrl.tokens.renderers.syntax import syntax_of
from deskrl.tokens.renderers.tools import check_tools


class TemplateRenderer:
    """Renders for any template whose properties can be proved.

    Raises:
        RendererError: they cannot; the message says which and why.
    """

    def __init__(self, tokenizer: ChatTokenizer, family: Family = GENERIC) -> None:
        self._set(tokenizer, family, derive(tokenizer, family))
        self.notes = prove(tokenizer, self.forms)

    def _set(self, tokenizer: ChatTokenizer, family: Family, forms: Forms) -> None:
        self.tokenizer = tokenizer
        self.forms = forms
        self.family = family.name
        self.call_syntax = self._taught(family)
        self._ends = frozenset(tokenizer.control_tokens[name] for name in forms.ends)
        extra = list(family.stops)
        if family.template_end_stops and "eos_token" in tokenizer.special_tokens:
            extra.append(tokenizer.special_tokens["eos_token"])
        stops = [tokenizer.control_tokens[name] for name in extra if name in tokenizer.control_tokens]
        self._stops = [*sorted(self._ends), *(stop for stop in dict.fromkeys(stops) if stop not in self._ends)]
        self._openers = () if forms.end else tuple(self._ends)

    def _taught(self, family: Family) -> str:
        if not self.forms.template_calls:
            return "hermes"  # what the preamble asks for
        taught = syntax_of(self.forms.call_example + self.forms.call_end)
        if family.call_syntaxes and taught not in family.call_syntaxes:
            raise RendererError(
                f"the template writes calls as {self.forms.call_example!r} ({taught or 'no known syntax'}), the family "
                f"{family.name} is for {' or '.join(family.call_syntaxes)}"
            )
        return taught or ""

    @property
    def call_example(self) -> str:
        """A turn of one call, its end included, as this model should write it: what a parser must read."""
        forms = self.forms
        if forms.template_calls:
            return forms.call_example + forms.call_end
        return f'<tool_call>\n{{"name": "{NAME}", "arguments": {{"{KEY}": "{VALUE}"}}}}\n</tool_call>{forms.end}'

    @property
    def stop_token_ids(self) -> list[int]:
        """Ids at which the engine must stop."""
        return list(self._stops)

    @property
    def prefill(self) -> str:
        """What the generation prompt holds of the model's turn."""
        return self.forms.prefill

    @property
    def prefilled_thought(self) -> bool:
        """Whether turns start inside reasoning."""
        return self.forms.reasoning.is_open(self.prefill)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of the first prompt. Raises RendererError for a tool that is no function definition."""
        check_tools(tools)
        turns = [self._normal(message) for message in messages]
        if tools and not self.forms.template_tools:
            turns = with_tool_preamble(turns, tools, self.forms.call_example)
        given = tools if self.forms.template_tools else None
        return self.tokenizer.encode_conversation(turns, tools=given, add_generation_prompt=True)

    def text(self, generated: Sequence[int]) -> str:
        """The turn for a parser."""
        return self.tokenizer.decode(generated)

    def inside_reasoning(self, generated: Sequence[int]) -> bool:
        """Whether the turn ended inside its reasoning."""
        return self.forms.reasoning.is_open(self.prefill + self.text(generated))

    def close(self, generated: Sequence[int]) -> list[int]:
        """Ids that complete the turn."""
        forms = self.forms
        ended = bool(generated) and generated[-1] in self._ends
        thought = forms.reasoning.end if not ended and self.inside_reasoning(generated) else ""
        return self._encode(thought + ("" if ended else forms.end) + forms.after_end)

    def observation(self, results: Sequence[str], *, names: Sequence[str] = (), after: Sequence[int] = ()) -> list[int]:
        """Ids of tool results and the next generation prompt."""
        return self._without_opener(self.tokenizer.encode_pieces(self.forms.result.pieces(results, names)), after)

    def user_message(self, text: str, *, after: Sequence[int] = ()) -> list[int]:
        """Ids of a user turn and the next generation prompt."""
        return self._without_opener(self.tokenizer.encode_pieces(self.forms.user.pieces(text)), after)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode_pieces([(text, Trust.TEMPLATE)])

    def _without_opener(self, ids: list[int], after: Sequence[int]) -> list[int]:
        sampled = bool(after) and after[-1] in self._openers and after[-1] == ids[0]
        return ids[1:] if sampled else ids

    def _normal(self, message: Message) -> Message:
        """A message with its calls' arguments as the template takes them: an object, or its JSON text."""
        if not message.get("tool_calls"):
            return message
        calls = []
        for call in message["tool_calls"]:
            arguments = call["function"]["arguments"]
            if isinstance(arguments, str) and not self.forms.arguments_as_text:
                arguments = json.loads(arguments)
            elif not isinstance(arguments, str) and self.forms.arguments_as_text:
                arguments = json.dumps(arguments, ensure_ascii=False)
            calls.append({**call, "function": {**call["function"], "arguments": arguments}})
        return {**message, "content": message.get("content") or self.forms.call_content, "tool_calls": calls}
