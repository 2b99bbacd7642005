"""What a ledger is made of, and its file.

Model: a ledger is three columns of one length (id, logprob, provenance of each token) and the spans that cover
them without gaps. A file is a compressed npz of the columns and one JSON text, `meta`; it knows nothing of
turns. Every fault of a file is a TokenLedgerError, whatever the bytes.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT_VERSION = 1


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
    INJECTED = "injected"


PROVENANCE_OF: Mapping[SpanKind, Provenance] = {
    SpanKind.PROMPT: Provenance.TEMPLATE,
    SpanKind.GENERATION: Provenance.SAMPLED,
    SpanKind.CLOSE: Provenance.TEMPLATE,
    SpanKind.OBSERVATION: Provenance.TOOL,
    SpanKind.INJECTED: Provenance.INJECTED,
}


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


@dataclass(frozen=True)
class Columns:
    """Equally long arrays, one entry a token; the logprob of a token that was not sampled is NaN."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    provenance: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, start: int, end: int) -> Columns:
        """Tokens `start:end`."""
        return Columns(self.ids[start:end], self.logprobs[start:end], self.provenance[start:end])


_TYPES: Mapping[str, type[np.generic]] = {"ids": np.int32, "logprobs": np.float32, "provenance": np.int8}


def pack(meta: Mapping[str, Any], columns: Columns) -> bytes:
    """A file of `columns` and of `meta`, which must be JSON."""
    text = json.dumps({"version": FORMAT_VERSION, **meta})
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        ids=columns.ids,
        logprobs=columns.logprobs,
        provenance=columns.provenance,
        meta=np.frombuffer(text.encode(), dtype=np.uint8),
    )
    return buffer.getvalue()


def unpack(data: bytes) -> tuple[dict[str, Any], Columns]:
    """Reads what `pack` wrote; columns of one length and the right types.

    Raises:
        TokenLedgerError: not a ledger file, another format version, or arrays that do not fit together.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            arrays: dict[str, NDArray[Any]] = {name: archive[name] for name in _TYPES}
            meta = dict(json.loads(archive["meta"].tobytes()))
        version = meta["version"]
    except Exception as error:  # zipfile, zlib and numpy raise a dozen classes for damaged bytes
        raise TokenLedgerError(f"not a token ledger: {type(error).__name__}: {error}") from error
    if version != FORMAT_VERSION:
        raise TokenLedgerError(f"ledger format {version}, this code reads {FORMAT_VERSION}")
    wrong = [name for name, kind in _TYPES.items() if arrays[name].dtype != kind or arrays[name].ndim != 1]
    lengths = {name: array.size for name, array in arrays.items()}
    if wrong or len(set(lengths.values())) != 1:
        raise TokenLedgerError(f"ledger arrays do not fit together: {lengths}, wrong types: {wrong}")
    return meta, Columns(**arrays)


def read_span(record: Any) -> Span:
    """A span as `dataclasses.asdict` wrote it.

    Raises:
        TokenLedgerError: it is none.
    """
    try:
        span = Span(**{**record, "kind": SpanKind(record["kind"])})
    except (TypeError, KeyError, ValueError) as error:
        raise TokenLedgerError(f"not a token ledger: {record!r} is no span ({error})") from error
    if not all(type(value) is int for value in (span.start, span.end, span.turn)):
        raise TokenLedgerError(f"not a token ledger: {record!r} is no span (positions must be integers)")
    return span
