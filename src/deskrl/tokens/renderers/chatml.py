"""ChatML turns (SmolLM2, Qwen2.5, Qwen3 without thinking): closes and observations in O(new tokens).

A ChatML conversation is `<|im_start|>ROLE\\nTEXT<|im_end|>\\n` repeated. The model samples TEXT and, when
it stops by itself, `<|im_end|>`; the newline after it belongs to the template. What a turn still needs
therefore depends only on how it really ended:

| last sampled id | close (mask 0) |
|---|---|
| `<|im_end|>` | `\\n` |
| anything else (cut by length, `<|endoftext|>`, nothing sampled) | `<|im_end|>\\n` |
| the same, in an unclosed `<think>` | `\\n</think>\\n\\n<|im_end|>\\n` |

Tool results use the Hermes form Qwen's templates use: one user turn, one `<tool_response>` block each.
Text between two control tokens is encoded in one piece, so that ids equal those of a full render.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deskrl.tokens.chat import ChatTemplateError, ChatTokenizer, Message, Piece, Trust
from deskrl.tokens.renderers.base import RendererError
from deskrl.tokens.renderers.preamble import with_tool_preamble
from deskrl.tokens.renderers.reasoning import THINK
from deskrl.tokens.renderers.tools import check_tools

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
_GENERATION_PROMPT: list[Piece] = [(f"{IM_START}assistant\n", Trust.TEMPLATE)]


class ChatMLRenderer:
    """Renders prompts, closes and observations for ChatML models.

    Raises:
        RendererError: the vocabulary lacks a control token, or a probe of the template shows that it is
            not plain ChatML (the run must not start with a guess).
    """

    family = "chatml"
    call_syntax = "hermes"
    prefill = ""
    prefilled_thought = False
    notes: tuple[str, ...] = ()

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self._control(IM_START)
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
        """Ids of the first prompt: system and user messages, tool definitions, generation prompt.

        Raises RendererError for a tool that is no function definition.
        """
        check_tools(tools)
        turns = with_tool_preamble(messages, tools) if tools else messages
        pieces = [piece for m in turns for piece in self._turn(m["role"], m["content"])]
        return self.tokenizer.encode_pieces([*pieces, *_GENERATION_PROMPT])

    def text(self, generated: Sequence[int]) -> str:
        """The turn for a parser."""
        return self.tokenizer.decode(generated)

    def inside_reasoning(self, generated: Sequence[int]) -> bool:
        """Whether the turn ended inside its reasoning."""
        return THINK.is_open(self.text(generated))

    def close(self, generated: Sequence[int]) -> list[int]:
        """Ids the template adds after a generation, given how it really ended."""
        if generated and generated[-1] == self._end:
            return list(self._newline)
        thought = THINK.end if self.inside_reasoning(generated) else ""
        return self.tokenizer.encode_pieces([(f"{thought}{IM_END}\n", Trust.TEMPLATE)])

    def observation(self, results: Sequence[str], *, names: Sequence[str] = (), after: Sequence[int] = ()) -> list[int]:
        """Ids of tool results (one user turn) and the next generation prompt."""
        blocks: list[Piece] = []
        for text in results:
            blocks += [("\n<tool_response>\n", Trust.TEMPLATE), (text, Trust.FOREIGN)]
            blocks.append(("\n</tool_response>", Trust.TEMPLATE))
        turn = [(f"{IM_START}user", Trust.TEMPLATE), *blocks, (f"{IM_END}\n", Trust.TEMPLATE)]
        return self.tokenizer.encode_pieces([*turn, *_GENERATION_PROMPT])

    def user_message(self, text: str, *, after: Sequence[int] = ()) -> list[int]:
        """Ids of a user turn (a warning, a repair request) and the next generation prompt."""
        return self.tokenizer.encode_pieces([*self._turn("user", text), *_GENERATION_PROMPT])

    def _turn(self, role: str, content: str) -> list[Piece]:
        trust = Trust.FOREIGN if role in ("user", "tool") else Trust.OWN
        return [(f"{IM_START}{role}\n", Trust.TEMPLATE), (content, trust), (f"{IM_END}\n", Trust.TEMPLATE)]

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
        ours = self.prompt(messages, [])
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
        ours = self.prompt(start, tools)[: -len(self.tokenizer.encode_pieces(_GENERATION_PROMPT))]
        ours += self.tokenizer.encode_pieces(self._turn("assistant", f"{written}\n{written}"))
        ours += self.observation(results)
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
