"""Tokens: the stream that trains is the stream that was sampled.

This package does no I/O and imports neither torch nor vllm. Three ideas, one file each:

- `ledger`: an append-only record of a trajectory's token ids and where each one came from;
- `chat`: a tokenizer and its chat template, with content kept from forging control tokens;
- `chatml` / `hermes`: how a family closes a turn, renders an observation and writes tool calls.
"""

from deskrl.tokens.chat import ChatTokenizer
from deskrl.tokens.chatml import ChatMLRenderer, RendererError
from deskrl.tokens.hermes import Malformed, ParsedTurn, ToolCall, parse_hermes
from deskrl.tokens.ledger import Provenance, Span, SpanKind, TokenLedger, TokenLedgerError

__all__ = [
    "ChatMLRenderer",
    "ChatTokenizer",
    "Malformed",
    "ParsedTurn",
    "Provenance",
    "RendererError",
    "Span",
    "SpanKind",
    "TokenLedger",
    "TokenLedgerError",
    "ToolCall",
    "parse_hermes",
]
