"""The token ledger: an append-only record of one trajectory's tokens.

Model: a trajectory is a sequence of spans. The first is the prompt; then, turn by turn, a generation
(ids the engine sampled), the template's close of that turn, and an observation (tool results and the
next generation prompt). Ids are appended and never changed, removed or re-tokenised.

Invariants, checked on every append:
- a token has loss mask 1 if and only if the engine sampled it;
- every sampled token has a finite logprob, no other token has one (stored as NaN, exported as 0.0);
- a generation records the weight version at its start and at its end.

Storage is a compressed npz: O(n) in the trajectory, not a full prompt for every turn.
"""

from __future__ import annotations

import io
import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT_VERSION = 1

# What float32 and int32 hold; a larger value would be stored as infinity or not at all.
_LARGEST_LOGPROB = float(np.finfo(np.float32).max)
_LARGEST_ID = 2**31 - 1


class TokenLedgerError(ValueError):
    """An append or a file that breaks an invariant; the message names the turn and the lengths."""


class Provenance(IntEnum):
    """Where a token came from."""

    TEMPLATE = 0
    SAMPLED = 1
    TOOL = 2
    INJECTED = 3


class SpanKind(StrEnum):
    """What a run of tokens is in the conversation."""

    PROMPT = "prompt"
    GENERATION = "generation"
    CLOSE = "close"
    OBSERVATION = "observation"


_PROVENANCE_OF: dict[SpanKind, Provenance] = {
    SpanKind.PROMPT: Provenance.TEMPLATE,
    SpanKind.GENERATION: Provenance.SAMPLED,
    SpanKind.CLOSE: Provenance.TEMPLATE,
    SpanKind.OBSERVATION: Provenance.TOOL,
}


_ARRAYS: dict[str, type[np.generic]] = {"ids": np.int32, "logprobs": np.float32, "provenance": np.int8}


@dataclass(frozen=True)
class Span:
    """Tokens `start:end` of the ledger. `weight_version_*` are None except for generations."""

    kind: SpanKind
    start: int
    end: int
    turn: int
    weight_version_start: int | None = None
    weight_version_end: int | None = None
    finish_reason: str | None = None


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

    def _append(self, kind: SpanKind, ids: Sequence[int], logprobs: Sequence[float] | None = None, **meta: Any) -> None:
        if not self._spans and kind is not SpanKind.PROMPT:
            raise TokenLedgerError(f"turn 0: {kind} needs a prompt before it")
        size = _LARGEST_ID + 1 if self._vocabulary_size is None else self._vocabulary_size
        for token in ids:
            if not 0 <= token < size:
                raise TokenLedgerError(f"turn {self._turn}: {kind} id {token} is outside the vocabulary of {size}")
        start = len(self._ids)
        self._ids.extend(ids)
        self._logprobs.extend(logprobs if logprobs is not None else [math.nan] * len(ids))
        self._provenance.extend([_PROVENANCE_OF[kind]] * len(ids))
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

    def to_bytes(self) -> bytes:
        """The ledger as a compressed npz (exact round trip with `from_bytes`)."""
        meta = {
            "version": FORMAT_VERSION,
            "vocabulary_size": self._vocabulary_size,
            "spans": [asdict(s) for s in self._spans],
        }
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer,
            ids=np.asarray(self._ids, dtype=np.int32),
            logprobs=np.asarray(self._logprobs, dtype=np.float32),
            provenance=np.asarray(self._provenance, dtype=np.int8),
            meta=np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8),
        )
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> TokenLedger:
        """Reads what `to_bytes` wrote.

        Raises:
            TokenLedgerError: not a ledger, another format version, or arrays that do not fit together.
        """
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as archive:
                arrays: dict[str, NDArray[Any]] = {name: archive[name] for name in _ARRAYS}
                meta = json.loads(archive["meta"].tobytes())
            version, size = meta["version"], meta["vocabulary_size"]
            spans = [Span(**{**s, "kind": SpanKind(s["kind"])}) for s in meta["spans"]]
        except Exception as error:  # zipfile, zlib and numpy raise a dozen classes for damaged bytes
            raise TokenLedgerError(f"not a token ledger: {type(error).__name__}: {error}") from error
        if version != FORMAT_VERSION:
            raise TokenLedgerError(f"ledger format {version}, this code reads {FORMAT_VERSION}")
        wrong = [name for name, kind in _ARRAYS.items() if arrays[name].dtype != kind or arrays[name].ndim != 1]
        lengths = {name: array.size for name, array in arrays.items()}
        end = spans[-1].end if spans else 0
        if wrong or set(lengths.values()) != {end}:
            raise TokenLedgerError(
                f"ledger arrays do not fit together: {lengths}, spans end at {end}, wrong types: {wrong}"
            )
        # Appending again is what checks the rest: ids, logprobs and the order of spans.
        ledger = cls(size)
        for span in spans:
            part = slice(span.start, span.end)
            logprobs = arrays["logprobs"][part].tolist() if span.kind is SpanKind.GENERATION else None
            ledger._restore(span, arrays["ids"][part].tolist(), logprobs)
        if ledger._spans != spans or list(ledger._provenance) != arrays["provenance"].tolist():
            raise TokenLedgerError("ledger arrays do not fit together: spans disagree with turns or provenance")
        return ledger

    def _restore(self, span: Span, ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        if logprobs is not None:
            self.append_generation(
                ids,
                logprobs,
                weight_version_start=span.weight_version_start,
                weight_version_end=span.weight_version_end,
                finish_reason=span.finish_reason,
            )
        elif span.kind is SpanKind.PROMPT:
            self.append_prompt(ids)
        else:
            self._append(span.kind, ids)
