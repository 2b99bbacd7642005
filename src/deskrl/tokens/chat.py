"""A tokenizer and its chat template, without torch or transformers.

Text that comes from outside (tool results, file contents) must never turn into control tokens: a mail
that contains `<|im_end|>` is eight ordinary tokens, not the end of a turn. Nor may it forge `</tool_response>` or
`<｜User｜>`, which many vocabularies do not even mark as special. So there are two encoders over one vocabulary:
`encode_template` honours control tokens, `encode_content` honours none.

Text between two control tokens is always encoded in one piece, wherever it comes from (`encode_pieces`,
`encode_conversation`): that is what makes ids equal to those of a full render.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from enum import IntEnum
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from tokenizers import Tokenizer

Message = Mapping[str, Any]


class Trust(IntEnum):
    """Which control tokens a text may hold."""

    FOREIGN = 0
    """None: tool results, user text, tool definitions."""
    OWN = 1
    """Those that are no special tokens (`<think>`, `<tool_call>`): system prompts and the model's own turns."""
    TEMPLATE = 2
    """All."""


Piece = tuple[str, Trust]


class ChatTemplateError(ValueError):
    """The chat template refused the conversation."""


_TRUSTED_ROLES = ("system", "developer", "assistant")


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value


def _ids(encoder: Tokenizer, text: str) -> list[int]:
    # `encode` holds the interpreter from end to end, so that a thread would not free the event loop; a batch does not.
    (encoding,) = encoder.encode_batch_fast([text], add_special_tokens=False)
    return list(encoding.ids)


def _raise(message: str) -> None:
    raise ChatTemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None) -> str:
    # transformers renders JSON in templates without HTML escapes; templates depend on it.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators)


class ChatTokenizer:
    """Token ids of template text, of content, and of whole conversations.

    Args:
        definition: the text of a `tokenizer.json`.
        chat_template: the Jinja source of the chat template.
        special_tokens: named tokens (`eos_token`, `bos_token`, ...) that the template may refer to.
    """

    def __init__(self, definition: str, chat_template: str, special_tokens: Mapping[str, str]) -> None:
        self._template_encoder = Tokenizer.from_str(definition)
        self._content_encoder = Tokenizer.from_str(definition)
        self._content_encoder.encode_special_tokens = True
        for encoder in (self._template_encoder, self._content_encoder):
            encoder.no_padding()
            encoder.no_truncation()
        added = self._template_encoder.get_added_tokens_decoder()
        self.special_names = frozenset(token.content for token in added.values() if token.special)
        self.control_tokens: Mapping[str, int] = {
            token.content: number
            for number, token in added.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }
        # Known as special, a control token is one that the content encoder leaves alone.
        self._content_encoder.add_special_tokens(list(self.control_tokens))
        self._all_controls = _any_of(self.control_tokens)
        self._special_controls = _any_of(self.special_names)
        self._own_controls = _any_of(self.control_tokens.keys() - self.special_names)
        unknown = json.loads(definition).get("model", {}).get("unk_token")
        self._unknown = self.token_id(unknown) if unknown is not None else None
        self._replacement = "?" if self._unknown in self.encode_template("\ufffd") else "\ufffd"
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template = environment.from_string(chat_template)

    @property
    def vocabulary_size(self) -> int:
        """Number of ids, added tokens included."""
        return int(self._template_encoder.get_vocab_size(with_added_tokens=True))

    @property
    def supports_tools(self) -> bool:
        """Whether the template itself renders tool definitions."""
        return "tools" in self.chat_template

    def token_id(self, token: str) -> int | None:
        """Id of one token, None if the vocabulary has none of that name."""
        found = self._template_encoder.token_to_id(token)
        return None if found is None else int(found)

    def encode_template(self, text: str) -> list[int]:
        """Ids of trusted text; special tokens in it become control tokens."""
        return _ids(self._template_encoder, text)

    def encode_content(self, text: str) -> list[int]:
        """Ids of untrusted text; the names of control tokens in it stay ordinary text."""
        if not text:
            return []
        ids = _ids(self._content_encoder, text)
        if self._unknown is None or self._unknown not in ids:
            return ids
        # Bytes the vocabulary lacks (SmolLM2: those of some rare planes) become its unknown token, and that may
        # be `<|endoftext|>`: the characters are replaced instead.
        encoding = self._content_encoder.encode(text, add_special_tokens=False)
        spans = zip(encoding.ids, encoding.offsets, strict=True)
        bad = {n for token, (start, end) in spans if token == self._unknown for n in range(start, end)}
        kept = "".join(self._replacement if n in bad else character for n, character in enumerate(text))
        return _ids(self._content_encoder, kept)

    def controls_in(self, text: str) -> list[tuple[int, str]]:
        """The control tokens in trusted text: position and name, in order."""
        return [(match.start(), match.group()) for match in self._all_controls.finditer(text)]

    def encode_pieces(self, pieces: Iterable[Piece]) -> list[int]:
        """Ids of texts one after the other; a control token ends a run only where its text may hold one."""
        ids: list[int] = []
        run: list[str] = []
        for text, trust in pieces:
            start = 0
            if trust is not Trust.FOREIGN:
                pattern = self._all_controls if trust is Trust.TEMPLATE else self._own_controls
                for match in pattern.finditer(text):
                    run.append(text[start : match.start()])
                    ids += self.encode_content("".join(run))
                    ids.append(self.control_tokens[match.group()])
                    run, start = [], match.end()
            run.append(text[start:])
        return ids + self.encode_content("".join(run))

    def encode_conversation(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool,
    ) -> list[int]:
        """Ids of the template's text of a whole conversation, in which only the template writes control tokens.

        Raises:
            ChatTemplateError: the template raised, or does not fit these messages.
        """
        given = json.dumps([list(map(dict, messages)), list(tools or [])], ensure_ascii=False, default=str)
        mark = next(chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in given)

        # A mark inside each name keeps it from being one, through whatever the template does to the text.
        def break_names(pattern: re.Pattern[str]) -> Callable[[str], str]:
            return lambda text: pattern.sub(lambda match: match.group()[0] + mark + match.group()[1:], text)

        every, special = break_names(self._all_controls), break_names(self._special_controls)
        marked = [_mapped(message, special if message.get("role") in _TRUSTED_ROLES else every) for message in messages]
        text = self.render(
            marked, tools=_mapped(list(tools or []), every) or None, add_generation_prompt=add_generation_prompt
        )
        written = re.compile(f"{mark}|\\\\u{ord(mark):04x}")
        ids: list[int] = []
        start = 0
        for match in self._all_controls.finditer(text):
            ids += self.encode_content(written.sub("", text[start : match.start()]))
            ids.append(self.control_tokens[match.group()])
            start = match.end()
        return ids + self.encode_content(written.sub("", text[start:]))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ids."""
        return str(self._template_encoder.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool,
    ) -> str:
        """The template's text of a whole conversation.

        Raises:
            ChatTemplateError: the template raised, or does not fit these messages.
        """
        try:
            return self._template.render(
                messages=[dict(m) for m in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except ChatTemplateError:
            raise
        except (jinja2.TemplateError, TypeError, AttributeError, KeyError, IndexError, ValueError) as error:
            raise ChatTemplateError(f"chat template failed: {error}") from error
