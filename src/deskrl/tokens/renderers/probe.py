"""Probe conversations: texts that can be found again in whatever a template makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deskrl.tokens.chat import ChatTemplateError, ChatTokenizer, Message
from deskrl.tokens.renderers.base import RendererError
from deskrl.tokens.renderers.forms import TRANSFORMS

SYSTEM, USER, NEXT, ANSWER, THOUGHT = "zqsystem", "zquser", "zqnext", "zqanswer", "zqthought"
NAME, KEY, VALUE = "zqtool", "zqkey", "zqvalue"

TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Ä tool.",
        "parameters": {
            "type": "object",
            "properties": {KEY: {"type": "string", "description": "a key"}},
            "required": [KEY],
        },
    },
}


def odd(tag: str) -> str:
    """A text on which every transform shows."""
    return f'\n  {tag}"é<\n\n{tag}z \n'


@dataclass(frozen=True)
class Dialect:
    """How a template wants messages: with a system turn or not, and how a turn of calls is given."""

    system: bool = True
    call_content: str | None = ""
    arguments_as_text: bool = False

    def start(self) -> list[Message]:
        """The messages of a prompt."""
        system: list[Message] = [{"role": "system", "content": SYSTEM}]
        return [*(system if self.system else []), {"role": "user", "content": USER}]

    def answer(self, reasoning: bool = False) -> Message:
        """A turn without calls."""
        return {"role": "assistant", "content": ANSWER, **_thought(reasoning)}

    def calls(self, count: int, reasoning: bool = False) -> Message:
        """A turn of calls, all of the same tool."""
        arguments: Any = f'{{"{KEY}": "{VALUE}"}}' if self.arguments_as_text else {KEY: VALUE}
        function = {"name": NAME, "arguments": arguments}
        calls = [{"id": _call_id(n), "type": "function", "function": function} for n in range(count)]
        return {"role": "assistant", "content": self.call_content, "tool_calls": calls, **_thought(reasoning)}


def results(texts: Sequence[str]) -> list[Message]:
    """The results of a turn of calls."""
    return [
        {"role": "tool", "content": text, "name": NAME, "tool_call_id": _call_id(n)} for n, text in enumerate(texts)
    ]


def user(text: str) -> Message:
    """A user turn."""
    return {"role": "user", "content": text}


def render(tokenizer: ChatTokenizer, messages: Sequence[Message], tools: bool, *, prompt: bool = True) -> str:
    """The template's text of a probe."""
    return tokenizer.render(messages, tools=[TOOL] if tools else None, add_generation_prompt=prompt)


def with_results(
    tokenizer: ChatTokenizer, dialect: Dialect, before: Sequence[Message], texts: Sequence[str], reasoning: bool = False
) -> list[Message]:
    """Messages with one more turn of calls and its results; one call where the template allows no more."""
    several = [*before, dialect.calls(len(texts), reasoning), *results(texts)]
    try:
        render(tokenizer, several, True)
    except ChatTemplateError:
        return [*before, dialect.calls(1, reasoning), *results(texts)]
    return several


def locate(text: str, content: str, what: str) -> tuple[int, int, str]:
    """Where a template put a content, and what it did to it: start, end, transform.

    Raises:
        RendererError: the content is not there, more than once there, or changed in an unknown way.
    """
    for name, transform in TRANSFORMS.items():
        written = transform(content)
        if text.count(written) == 1:
            start = text.index(written)
            return start, start + len(written), name
    raise RendererError(
        f"the template changes {what} in a way that cannot be followed: {content!r} does not show (once) in "
        f"...{text[-200:]!r}"
    )


def _call_id(number: int) -> str:
    return f"zqcall{number:03d}"


def _thought(reasoning: bool) -> dict[str, str]:
    # Qwen, GLM and DeepSeek name it `reasoning_content`, gpt-oss `thinking`.
    return {"reasoning_content": THOUGHT, "thinking": THOUGHT} if reasoning else {}
