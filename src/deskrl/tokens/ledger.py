"""The token ledger: an append-only record of one trajectory's tokens.

Model: a trajectory is a sequence of spans. The first is the prompt; then, turn by turn, a generation
(ids the engine sampled), the template's close of that turn, and an observation (tool results and the
next generation prompt) or an injected message (a repair request, a warning). Ids are appended and never
changed, removed or re-tokenised. A fork starts with another ledger's first tokens and goes its own way.

Invariants, checked on every append:
- a token has loss mask 1 if and only if the engine sampled it;
- every sampled token has a finite logprob, no other token has one (stored as NaN, exported as 0.0);
- a generation records the weight version at its start and at its end.

Storage is a compressed npz: O(n) in the trajectory, not a full prompt for every turn.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from deskrl.tokens.storage import (
    PROVENANCE_OF,
    Columns,
    Provenance,
    Span,
    SpanKind,
    TokenLedgerError,
    pack,
    read_span,
    unpack,
)

__all__ = ["Provenance", "Span", "SpanKind", "TokenLedger", "TokenLedgerError"]

# What float32 and int32 hold; a larger value would be stored as infinity or not at all.
_LARGEST_LOGPROB = float(np.finfo(np.float32).max)
_LARGEST_ID = 2**31 - 1


class TokenLedger:
    """Append-only token record of one trajectory.

    Args:
        vocabulary_size: ids outside `[0, vocabulary_size)` are refused; None: only what int32 cannot hold.
    """

    def __init__(self, vocabulary_size: int | None = None) -> None:
        self._vocabulary_size = vocabulary_size
        self._ids = array("i")
        self._logprobs = array("f")
        self._provenance = array("b")
        self._spans: list[Span] = []
        self._turn = 0
        # Of a fork: whose first `_shared` tokens, in `_shared_spans` spans, it starts with.
        self._parent: TokenLedger | None = None
        self._shared = 0
        self._shared_spans = 0
        self._children: list[TokenLedger] = []

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def spans(self) -> tuple[Span, ...]:
        """All spans in order."""
        return tuple(self._spans)

    @property
    def turns(self) -> int:
        """Number of generations so far."""
        return self._turn

    @property
    def ids(self) -> list[int]:
        """All token ids, in order."""
        return self._ids.tolist()

    @property
    def packed_ids(self) -> array[int]:
        """A copy of `ids` as 32-bit integers: cheap however long the trajectory is."""
        return self._ids[:]

    @property
    def parent(self) -> TokenLedger | None:
        """The ledger this one was forked from."""
        return self._parent

    @property
    def shared(self) -> int:
        """How many of the first tokens are the parent's; 0 for a ledger that is no fork."""
        return self._shared

    @property
    def forks(self) -> tuple[TokenLedger, ...]:
        """The ledgers forked from this one, oldest first."""
        return tuple(self._children)

    @property
    def loss_mask(self) -> list[int]:
        """1 for each sampled token, 0 for every other; same length as `ids`."""
        return [int(p == Provenance.SAMPLED) for p in self._provenance]

    @property
    def logprobs(self) -> list[float]:
        """The engine's logprob of each sampled token, 0.0 for every other; same length as `ids`."""
        return [0.0 if math.isnan(value) else value for value in self._logprobs]

    @property
    def provenance(self) -> list[Provenance]:
        """Provenance of each token; same length as `ids`."""
        return [Provenance(p) for p in self._provenance]

    @property
    def sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(s.end - s.start for s in self._spans if s.kind is SpanKind.GENERATION)

    def append_prompt(self, ids: Sequence[int]) -> None:
        """Appends the initial prompt (mask 0). Only as the first span."""
        if self._spans:
            raise TokenLedgerError(f"turn {self._turn}: a prompt can only be the first span, have {len(self)} tokens")
        self._append(SpanKind.PROMPT, ids)

    def append_generation(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        *,
        weight_version_start: int | None = None,
        weight_version_end: int | None = None,
        finish_reason: str | None = None,
    ) -> None:
        """Appends sampled ids with their logprobs (natural log), one each (mask 1).

        An empty generation is recorded as an empty span: nothing is invented to fill it.

        Raises:
            TokenLedgerError: lengths differ, a logprob is None or not finite, an id is out of vocabulary.
        """
        if len(ids) != len(logprobs):
            raise TokenLedgerError(
                f"turn {self._turn}: {len(ids)} sampled ids but {len(logprobs)} logprobs; "
                "the engine must return one each"
            )
        for position, value in enumerate(logprobs):
            if value is None or not abs(value) <= _LARGEST_LOGPROB:
                raise TokenLedgerError(f"turn {self._turn}: logprob {position} of {len(logprobs)} is {value!r}")
        self._append(
            SpanKind.GENERATION,
            ids,
            logprobs,
            weight_version_start=weight_version_start,
            weight_version_end=weight_version_end,
            finish_reason=finish_reason,
        )
        self._turn += 1

    def append_close(self, ids: Sequence[int]) -> None:
        """Appends what the template puts after a generation and the model did not sample (mask 0)."""
        self._append(SpanKind.CLOSE, ids)

    def append_observation(self, ids: Sequence[int]) -> None:
        """Appends tool results and the next generation prompt (mask 0)."""
        self._append(SpanKind.OBSERVATION, ids)

    def append_injected(self, ids: Sequence[int]) -> None:
        """Appends a message of the harness itself and the next generation prompt (mask 0)."""
        self._append(SpanKind.INJECTED, ids)

    def _append(self, kind: SpanKind, ids: Sequence[int], logprobs: Sequence[float] | None = None, **meta: Any) -> None:
        if not self._spans and kind is not SpanKind.PROMPT:
            raise TokenLedgerError(f"turn 0: {kind} needs a prompt before it")
        size = _LARGEST_ID + 1 if self._vocabulary_size is None else self._vocabulary_size
        if len(ids) and not (min(ids) >= 0 and max(ids) < size):
            token = next(token for token in ids if not 0 <= token < size)
            raise TokenLedgerError(f"turn {self._turn}: {kind} id {token} is outside the vocabulary of {size}")
        # All that can still fail comes before the first change.
        new_ids = array("i", ids)
        new_logprobs = array("f", [math.nan]) * len(ids) if logprobs is None else array("f", logprobs)
        start = len(self._ids)
        self._ids += new_ids
        self._logprobs += new_logprobs
        self._provenance += array("b", [PROVENANCE_OF[kind]]) * len(ids)
        self._spans.append(Span(kind, start, len(self._ids), self._turn, **meta))

    def training_split(self) -> tuple[list[int], list[int], list[int], list[float]]:
        """(prompt_ids, response_ids, loss_mask, logprobs): the last three have equal lengths.

        The response ends with the last sampled token: what follows it (a close, an unanswered
        observation) has mask 0 and no effect on any loss, so it is left out.
        """
        if not self._spans:
            return [], [], [], []
        start = self._spans[0].end
        generations = [s for s in self._spans if s.kind is SpanKind.GENERATION and s.end > s.start]
        end = generations[-1].end if generations else start
        return (
            self._ids[:start].tolist(),
            self._ids[start:end].tolist(),
            self.loss_mask[start:end],
            self.logprobs[start:end],
        )

    def fork(self, at: int) -> TokenLedger:
        """A new ledger whose first `at` tokens are this one's (context compaction, a sub-agent).

        The two go their own ways afterwards. A span that reaches past `at` is cut there; `fork(0)` is empty and
        takes a prompt of its own. Tokens are copied, so that each ledger is whole by itself; that a sampled token
        of several branches trains only once is seen to by the export (`deskrl.tokens.fork`).

        Raises:
            TokenLedgerError: `at` is not a position of this ledger.
        """
        if not 0 <= at <= len(self):
            raise TokenLedgerError(f"turn {self._turn}: cannot fork at {at}, the ledger has {len(self)} tokens")
        # Empty spans at `at` come along, but not into a fork that has yet to take its prompt.
        return self._fork(at, sum(span.start < at or span.end <= at for span in self._spans) if at else 0)

    def _fork(self, at: int, spans: int) -> TokenLedger:
        child = TokenLedger(self._vocabulary_size)
        child._ids, child._logprobs, child._provenance = self._ids[:at], self._logprobs[:at], self._provenance[:at]
        child._spans = self._spans[:spans]
        if spans and child._spans[-1].end > at:
            # How the generation ended is no longer part of it.
            child._spans[-1] = replace(child._spans[-1], end=at, finish_reason=None)
        child._turn = sum(span.kind is SpanKind.GENERATION for span in child._spans)
        child._parent, child._shared, child._shared_spans = self, at, spans
        self._children.append(child)
        return child

    def to_bytes(self) -> bytes:
        """The ledger as a compressed npz (exact round trip with `from_bytes`).

        A fork is written whole, without its descent; `Trajectories.to_bytes` writes a tree, each token once.
        """
        return pack(self._meta(0), self._columns(0))

    @classmethod
    def from_bytes(cls, data: bytes) -> TokenLedger:
        """Reads what `to_bytes` wrote.

        Raises:
            TokenLedgerError: not a ledger, another format version, or arrays that do not fit together.
        """
        meta, columns = unpack(data)
        if "branches" in meta:
            raise TokenLedgerError("the file holds a tree of forks: read it with Trajectories.from_bytes")
        ledger = cls()
        ledger._restore(meta, columns)
        return ledger

    def _meta(self, first_span: int) -> dict[str, Any]:
        return {"vocabulary_size": self._vocabulary_size, "spans": [asdict(s) for s in self._spans[first_span:]]}

    def _columns(self, start: int) -> Columns:
        return Columns(
            np.array(self._ids[start:], dtype=np.int32),
            np.array(self._logprobs[start:], dtype=np.float32),
            np.array(self._provenance[start:], dtype=np.int8),
        )

    def _restore(self, meta: dict[str, Any], columns: Columns) -> None:
        """Adds what `_meta` and `_columns` gave. Appending again is what checks ids, logprobs and their order."""
        try:
            size, spans = meta["vocabulary_size"], [read_span(record) for record in meta["spans"]]
        except (KeyError, TypeError) as error:
            raise TokenLedgerError(f"not a token ledger: {type(error).__name__}: {error}") from error
        if size is not None and type(size) is not int:
            raise TokenLedgerError(f"not a token ledger: a vocabulary of {size!r}")
        self._vocabulary_size = size
        base, before = len(self), len(self._spans)
        end = spans[-1].end if spans else base
        if len(columns) != end - base:
            raise TokenLedgerError(
                f"ledger arrays do not fit together: {len(columns)} tokens, spans from {base} to {end}"
            )
        for span in spans:
            part = columns.part(max(0, span.start - base), max(0, span.end - base))
            if span.kind is SpanKind.GENERATION:
                self.append_generation(
                    part.ids.tolist(),
                    part.logprobs.tolist(),
                    weight_version_start=span.weight_version_start,
                    weight_version_end=span.weight_version_end,
                    finish_reason=span.finish_reason,
                )
            elif span.kind is SpanKind.PROMPT:
                self.append_prompt(part.ids.tolist())
            else:
                self._append(span.kind, part.ids.tolist())
        if self._spans[before:] != spans or self._provenance[base:].tolist() != columns.provenance.tolist():
            raise TokenLedgerError("ledger arrays do not fit together: spans disagree with turns or provenance")
