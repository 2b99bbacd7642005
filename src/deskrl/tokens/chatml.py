"""ChatML turns (SmolLM2, Qwen2.5, Qwen3 without thinking): closes and observations in O(new tokens).

A ChatML conversation is `<|im_start|>ROLE\\nTEXT<|im_end|>\\n` repeated. The model samples TEXT and, when
it stops by itself, `<|im_end|>`; the newline after it belongs to the template. What a turn still needs
therefore depends only on how it really ended:

| last sampled id | close (mask 0) |
|---|---|
| `<|im_end|>` | `\\n` |
| anything else (cut by length, `<|endoftext|>`, nothing sampled) | `<|im_end|>\\n` |

Tool results use the Hermes form Qwen's templates use: one user turn, one `<tool_response>` block each.
Text between two control tokens is encoded in one piece, so that ids equal those of a full render.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from deskrl.tokens.chat import ChatTemplateError, ChatTokenizer, Message

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"

# Qwen's wording (Qwen2.5 chat template), for templates that cannot render tools themselves.
TOOL_PREAMBLE = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOL_POSTAMBLE = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


class RendererError(ValueError):
    """This tokenizer or template is not of the family the renderer is for; the message says why."""


class ChatMLRenderer:
    """Renders prompts, closes and observations for ChatML models.

    Raises:
        RendererError: the vocabulary lacks a control token, or a probe of the template shows that it is
            not plain ChatML (the run must not start with a guess).
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self._start = self._control(IM_START)
        self._end = self._control(IM_END)
        self._newline = tokenizer.encode_content("\n")
        self._probe()

    @property
    def stop_token_ids(self) -> list[int]:
        """Ids at which the engine must stop."""
        ids = [self._end]
        end_of_text = self.tokenizer.token_id("<|endoftext|>")
        return ids if end_of_text is None else [*ids, end_of_text]

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of the first prompt: system and user messages, tool definitions, generation prompt."""
        turns = list(messages)
        if tools:
            definitions = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
            text = TOOL_PREAMBLE + definitions + TOOL_POSTAMBLE
            if turns and turns[0]["role"] == "system":
                turns[0] = {"role": "system", "content": turns[0]["content"] + text}
            else:
                turns.insert(0, {"role": "system", "content": text.lstrip("\n")})
        return [i for m in turns for i in self._turn(m["role"], m["content"])] + self._generation_prompt()

    def close(self, generated: Sequence[int]) -> list[int]:
        """Ids the template adds after a generation, given how it really ended."""
        if generated and generated[-1] == self._end:
            return list(self._newline)
        return [self._end, *self._newline]

    def observation(self, results: Sequence[str]) -> list[int]:
        """Ids of tool results (one user turn) and the next generation prompt."""
        blocks = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in results)
        return self._turn("user", blocks) + self._generation_prompt()

    def user_message(self, text: str) -> list[int]:
        """Ids of a user turn (a warning, a repair request) and the next generation prompt."""
        return self._turn("user", text) + self._generation_prompt()

    def _turn(self, role: str, content: str) -> list[int]:
        body = self.tokenizer.encode_content(f"{role}\n{content}")
        return [self._start, *body, self._end, *self._newline]

    def _generation_prompt(self) -> list[int]:
        return [self._start, *self.tokenizer.encode_content("assistant\n")]

    def _control(self, token: str) -> int:
        found = self.tokenizer.token_id(token)
        if found is None:
            raise RendererError(f"the tokenizer has no {token!r}: not a ChatML model")
        return found

    def _probe(self) -> None:
        """Proves on this template that turn-by-turn ids equal the ids of a full render."""
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "System  text."},
            {"role": "user", "content": "Ünïcode\n\nquestion "},
            {"role": "assistant", "content": "answer: 1,234\n"},
            {"role": "user", "content": "\nnext"},
        ]
        ours = [i for m in messages for i in self._turn(m["role"], m["content"])] + self._generation_prompt()
        self._compare("plain ChatML", messages, [], ours)
        if not self.tokenizer.supports_tools:
            return
        # The template says which format the model was trained on; Hermes must be it, to the letter.
        function = {"name": "f", "description": "Ä.", "parameters": {"type": "object", "properties": {}}}
        tools = [{"type": "function", "function": function}]
        written = '<tool_call>\n{"name": "f", "arguments": {"b": 1, "a": "<x>"}}\n</tool_call>'
        call = {"type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": "<x>"}}}
        start, results = messages[:2], ["one\n", " two"]
        conversation = [
            *start,
            {"role": "assistant", "content": "", "tool_calls": [call, call]},
            *({"role": "tool", "content": text} for text in results),
        ]
        ours = self.prompt(start, tools)[: -len(self._generation_prompt())]
        ours += self._turn("assistant", f"{written}\n{written}") + self.observation(results)
        self._compare("ChatML with Hermes tool calls", conversation, tools, ours)

    def _compare(
        self, form: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], ours: list[int]
    ) -> None:
        try:
            text = self.tokenizer.render(messages, tools=tools, add_generation_prompt=True)
        except ChatTemplateError as error:
            raise RendererError(f"the chat template is not {form}: {error}") from error
        rendered = self.tokenizer.encode_template(text)
        if rendered != ours:
            pairs = enumerate(zip(rendered, ours, strict=False))
            same = next((n for n, (a, b) in pairs if a != b), min(len(rendered), len(ours)))
            raise RendererError(
                f"the chat template is not {form}: a probe conversation renders to {len(rendered)} ids, turn by turn "
                f"to {len(ours)}; from id {same} on the template has {self.tokenizer.decode(rendered[same:])[:80]!r}, "
                f"this renderer {self.tokenizer.decode(ours[same:])[:80]!r}. This model needs a renderer of its own "
                "family"
            )
