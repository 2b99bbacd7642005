"""A ledger to read: coloured by provenance, for a terminal and as HTML.

Model: each span of the ledger becomes pieces of text. Control tokens are pieces of their own, so that a real
`<|im_end|>` looks different from one that a mail spells out. Bytes of one character that are spread over several
tokens stay together.

Invariants:
- every token belongs to exactly one piece, in order;
- a token that decodes to nothing readable by itself (half a character that was cut, an id without text) appears
  as `⟨#id⟩`: nothing disappears;
- nothing in the text can act: control and direction-changing characters are shown, markup is escaped.
"""

from __future__ import annotations

import functools
import html
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from deskrl.tokens.ledger import Provenance, Span, SpanKind, TokenLedger, TokenLedgerError
from deskrl.tokens.storage import PROVENANCE_OF

if TYPE_CHECKING:
    from rich.text import Text

Decode = Callable[[Sequence[int]], str]

_BROKEN = "\ufffd"
# Tokens that can share bytes of a character with the one before them; a character has four bytes at most.
_LONGEST_CHARACTER = 8

_TERMINAL_STYLES = {
    Provenance.TEMPLATE: "dim",
    Provenance.SAMPLED: "bold green",
    Provenance.TOOL: "cyan",
    Provenance.INJECTED: "yellow",
}

CSS = """.ledger{white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.5 ui-monospace,monospace}
.ledger .template{color:#777}.ledger .sampled{color:#087a2f;background:#e9f8ee}
.ledger .tool{color:#0b5c8a}.ledger .injected{color:#8a5a00;background:#fff6dd}
.ledger .control{font-weight:bold;outline:1px solid currentColor;outline-offset:-1px}
.ledger .token{box-shadow:inset 1px 0 #bbb}
"""


class Tokenizer(Protocol):
    """What `ChatTokenizer` has."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ids."""


@dataclass(frozen=True)
class Piece:
    """Tokens `start:end` of a ledger, all in one span, and their text as it is."""

    text: str
    start: int
    end: int
    span: Span
    control: bool = False

    @property
    def provenance(self) -> Provenance:
        """Where the tokens came from."""
        return PROVENANCE_OF[self.span.kind]


def pieces(
    ledger: TokenLedger, decode: Decode, is_control: Callable[[int], bool], *, each_token: bool = False
) -> Iterator[Piece]:
    """The ledger's text in order; `each_token` splits it at every token that ends a character."""
    ids = ledger.ids
    blank = functools.cache(lambda token: decode([token]) == "")
    control = functools.cache(is_control)
    for span in ledger.spans:
        position = span.start
        while position < span.end:
            start, token = position, ids[position]
            position += 1
            if blank(token) or control(token):
                text = _unreadable(token) if blank(token) else decode([token])
                yield Piece(text, start, position, span, control=control(token))
                continue
            while position < span.end and not blank(ids[position]) and not control(ids[position]):
                position += 1
            run = ids[start:position]
            text = decode(run)
            if not each_token and _BROKEN not in text:
                yield Piece(text, start, position, span)
                continue
            for text, first, last in _characters(run, decode):
                yield Piece(text, start + first, start + last, span)


def _characters(run: list[int], decode: Decode) -> Iterator[tuple[str, int, int]]:
    """(text, start, end) of the shortest groups of tokens that decode to whole characters."""
    start, before = 0, 0
    while start < len(run):
        # Some decoders drop a space at the start of a text: the group before is decoded with this one.
        context = run[before:start]
        known = decode(context) if context else ""
        if _BROKEN in known:
            context, known = [], ""
        for end in range(start + 1, min(start + _LONGEST_CHARACTER, len(run)) + 1):
            text = decode([*context, *run[start:end]])
            text = text[len(known) :] if text.startswith(known) else decode(run[start:end])
            if _BROKEN not in text:
                break
        else:
            end = start + 1
            text = _unreadable(run[start])
        yield text, start, end
        start, before = end, start


def _unreadable(token: int) -> str:
    return f"⟨#{token}⟩"


def visible(text: str, *, newlines: bool = False) -> str:
    """`text` with nothing that a terminal or a browser would obey; `newlines` marks line ends as well."""
    return "".join(_visible_character(c, newlines) for c in text)


def _visible_character(character: str, newlines: bool) -> str:
    code = ord(character)
    if character == "\n":
        return "↵\n" if newlines else "\n"
    if character == "\t":
        return character
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    if 0x80 <= code < 0xA0 or 0x200E <= code <= 0x200F or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069:
        return f"\\u{code:04x}"
    return character


def show(ledger: TokenLedger, tokenizer: Tokenizer, *, boundaries: bool = False) -> Text:
    """The ledger for a terminal: template dim, sampled green, tool cyan, injected yellow, control tokens reversed.

    Args:
        boundaries: mark where each token begins and each line ends.
    """
    from rich.text import Text

    text = Text()
    for piece in pieces(ledger, tokenizer.decode, _control_test(tokenizer), each_token=boundaries):
        if boundaries:
            text.append("│", style="bright_black")
        style = _TERMINAL_STYLES[piece.provenance] + (" reverse" if piece.control else "")
        text.append(visible(piece.text, newlines=boundaries), style=style)
    return text


def show_html(
    ledger: TokenLedger,
    tokenizer: Tokenizer,
    *,
    boundaries: bool = False,
    values: Mapping[str, Sequence[float]] | None = None,
) -> str:
    """The ledger as one `<div class="ledger">` of escaped spans (style: `CSS`).

    A span's classes are its provenance, `control` for a control token, `token` with `boundaries`; its title says
    which turn, weights and end of generation it belongs to.

    Args:
        boundaries: a span for each token, with its id and logprob in the title, and a mark at each line end.
        values: numbers for each token by name (an advantage); they go into titles, and imply a span for each token.

    Raises:
        TokenLedgerError: values of another length than the ledger.
    """
    for name, numbers in (values or {}).items():
        if len(numbers) != len(ledger):
            raise TokenLedgerError(f"{len(numbers)} values of {name!r} for {len(ledger)} tokens")
    each_token = boundaries or bool(values)
    columns = {"logprob": ledger.logprobs, **(values or {})} if each_token else {}
    ids = ledger.ids
    parts = ['<div class="ledger">']
    for piece in pieces(ledger, tokenizer.decode, _control_test(tokenizer), each_token=each_token):
        classes = piece.provenance.name.lower() + " control" * piece.control + " token" * boundaries
        title = _span_title(piece.span)
        if each_token:
            title += "; id " + " ".join(map(str, ids[piece.start : piece.end]))
            for name, column in columns.items():
                numbers = [value for value in column[piece.start : piece.end] if not math.isnan(value)]
                if numbers and (name != "logprob" or piece.provenance is Provenance.SAMPLED):
                    title += f"; {name} " + " ".join(f"{value:.4g}" for value in numbers)
        text = html.escape(visible(piece.text, newlines=boundaries))
        parts.append(f'<span class="{classes}" title="{html.escape(title)}">{text}</span>')
    return "".join([*parts, "</div>"])


def html_page(title: str, body: str) -> str:
    """A document around `show_html`, complete in itself."""
    legend = " ".join(f'<span class="{p.name.lower()}">{p.name.lower()}</span>' for p in Provenance)
    return (
        f'<!doctype html><html><head><meta charset="utf-8"><title>{html.escape(title)}</title><style>{CSS}</style>'
        f'</head><body><h1>{html.escape(title)}</h1><p class="ledger">{legend} '
        f'<span class="control">control token</span></p>{body}</body></html>\n'
    )


def _control_test(tokenizer: Tokenizer) -> Callable[[int], bool]:
    """Whether the vocabulary marks a token as special: only then does it vanish when those are skipped."""

    def test(token: int) -> bool:
        return tokenizer.decode([token]) != "" and tokenizer.decode([token], skip_special_tokens=True) == ""

    return test


def _span_title(span: Span) -> str:
    title = f"{span.kind}, turn {span.turn}"
    if span.kind is SpanKind.GENERATION:
        if span.weight_version_start is not None:
            title += f", weights {span.weight_version_start} to {span.weight_version_end}"
        if span.finish_reason is not None:
            title += f", ended by {span.finish_reason}"
    return title
