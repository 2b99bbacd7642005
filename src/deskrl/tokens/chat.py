"""A tokenizer and its chat template, without torch or transformers.

Text that comes from outside (tool results, file contents) must never turn into control tokens: a mail
that contains `<|im_end|>` is eight ordinary tokens, not the end of a turn. So there are two encoders over
one vocabulary: `encode_template` honours special tokens, `encode_content` does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from tokenizers import Tokenizer

Message = Mapping[str, Any]


class ChatTemplateError(ValueError):
    """The chat template refused the conversation."""


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
        return list(self._template_encoder.encode(text, add_special_tokens=False).ids)

    def encode_content(self, text: str) -> list[int]:
        """Ids of untrusted text; the names of special tokens in it stay ordinary text."""
        encoding = self._content_encoder.encode(text, add_special_tokens=False)
        if self._unknown is None or self._unknown not in encoding.ids:
            return list(encoding.ids)
        # Bytes the vocabulary lacks (SmolLM2: those of some rare planes) become its unknown token, and that may
        # be `<|endoftext|>`: the characters are replaced instead.
        spans = zip(encoding.ids, encoding.offsets, strict=True)
        bad = {n for token, (start, end) in spans if token == self._unknown for n in range(start, end)}
        kept = "".join(self._replacement if n in bad else character for n, character in enumerate(text))
        return list(self._content_encoder.encode(kept, add_special_tokens=False).ids)

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
