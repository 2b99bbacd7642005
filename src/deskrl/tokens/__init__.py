"""Tokens: the stream that trains is the stream that was sampled.

This package does no I/O and imports neither torch nor vllm.

- `ledger`, `fork`, `storage`: an append-only record of a trajectory's token ids and where each one came from; its
  branches, in which a shared span trains once; its file;
- `chat`: a tokenizer and its chat template, with content kept from forging control tokens;
- `renderers`: how a model family closes a turn and writes what follows, proved on the template before use;
- `parsing`: what a sampled turn says: thought, message, tool calls, with typed outcomes;
- `check`: whether template, tokenizer, renderer and parser fit together;
- `show`: a ledger for people, coloured by provenance.
"""

from deskrl.tokens.chat import ChatTokenizer
from deskrl.tokens.chatml import ChatMLRenderer, RendererError
from deskrl.tokens.check import Finding, check_model
from deskrl.tokens.fork import Branch, Trajectories
from deskrl.tokens.hermes import Malformed, ParsedTurn, ToolCall, parse_hermes
from deskrl.tokens.ledger import Provenance, Span, SpanKind, TokenLedger, TokenLedgerError
from deskrl.tokens.parsing import Parser, parser_for
from deskrl.tokens.renderers import TurnRenderer, renderer_for

__all__ = [
    "Branch",
    "ChatMLRenderer",
    "ChatTokenizer",
    "Finding",
    "Malformed",
    "ParsedTurn",
    "Parser",
    "Provenance",
    "RendererError",
    "Span",
    "SpanKind",
    "TokenLedger",
    "TokenLedgerError",
    "ToolCall",
    "Trajectories",
    "TurnRenderer",
    "check_model",
    "parse_hermes",
    "parser_for",
    "renderer_for",
]
