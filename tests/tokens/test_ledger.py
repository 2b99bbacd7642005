"""The ledger: append-only, mask 1 exactly on sampled tokens, an exact file, and refusals that change nothing."""

from __future__ import annotations

import io
import json
import math
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deskrl.tokens import Provenance, Span, SpanKind, TokenLedger, TokenLedgerError

VOCABULARY = 1000
_EXAMPLES = settings(deadline=None)
_IDS = st.lists(st.integers(0, VOCABULARY - 1), max_size=6)
_LOGPROB = st.floats(-50, 0, width=32)
_GENERATION = st.tuples(st.just(SpanKind.GENERATION), st.lists(st.tuples(st.integers(0, VOCABULARY - 1), _LOGPROB)))
_OTHER = st.tuples(st.sampled_from([SpanKind.CLOSE, SpanKind.OBSERVATION, SpanKind.INJECTED]), _IDS)
_APPENDS = st.lists(st.one_of(_GENERATION, _OTHER), max_size=12)
_SOURCES = {
    SpanKind.CLOSE: Provenance.TEMPLATE,
    SpanKind.OBSERVATION: Provenance.TOOL,
    SpanKind.INJECTED: Provenance.INJECTED,
}
_VERSION = st.one_of(st.none(), st.integers(0, 9))


def _append(ledger: TokenLedger, kind: SpanKind, tokens: list[Any], version: int | None = None) -> None:
    if kind is SpanKind.GENERATION:
        ledger.append_generation(
            [i for i, _ in tokens],
            [p for _, p in tokens],
            weight_version_start=version,
            weight_version_end=None if version is None else version + 1,
            finish_reason="stop",
        )
    elif kind is SpanKind.CLOSE:
        ledger.append_close(tokens)
    elif kind is SpanKind.INJECTED:
        ledger.append_injected(tokens)
    else:
        ledger.append_observation(tokens)


@_EXAMPLES
@given(_IDS, _APPENDS, _VERSION)
def test_any_sequence_of_appends_keeps_the_invariants(prompt: list[int], appends: Any, version: int | None) -> None:
    ledger = TokenLedger(VOCABULARY)
    ledger.append_prompt(prompt)
    expected = [(i, 0, 0.0, Provenance.TEMPLATE) for i in prompt]
    for kind, tokens in appends:
        before = ledger.ids
        _append(ledger, kind, tokens, version)
        assert ledger.ids[: len(before)] == before
        if kind is SpanKind.GENERATION:
            expected += [(i, 1, p, Provenance.SAMPLED) for i, p in tokens]
        else:
            source = _SOURCES[kind]
            expected += [(i, 0, 0.0, source) for i in tokens]
    found = list(zip(ledger.ids, ledger.loss_mask, ledger.logprobs, ledger.provenance, strict=True))
    assert found == expected
    assert list(ledger.packed_ids) == ledger.ids
    assert len(ledger) == len(expected)
    assert ledger.sampled == sum(ledger.loss_mask)
    assert ledger.turns == sum(kind is SpanKind.GENERATION for kind, _ in appends)
    assert [s.kind for s in ledger.spans] == [SpanKind.PROMPT, *(kind for kind, _ in appends)]
    assert [s.start for s in ledger.spans] == [0, *(s.end for s in ledger.spans[:-1])]

    prompt_ids, response, mask, logprobs = ledger.training_split()
    assert prompt_ids == prompt
    assert len(response) == len(mask) == len(logprobs)
    assert prompt_ids + response == ledger.ids[: len(prompt) + len(response)]
    assert sum(mask) == ledger.sampled
    # It ends with the last sampled token; with none at all, nothing is made up.
    assert mask[-1:] == ([1] if ledger.sampled else [])


@_EXAMPLES
@given(_IDS, _APPENDS, _VERSION)
def test_the_file_is_an_exact_round_trip(prompt: list[int], appends: Any, version: int | None) -> None:
    ledger = TokenLedger(VOCABULARY)
    ledger.append_prompt(prompt)
    for kind, tokens in appends:
        _append(ledger, kind, tokens, version)
    again = TokenLedger.from_bytes(ledger.to_bytes())
    for name in ("ids", "loss_mask", "logprobs", "provenance", "spans", "turns", "sampled"):
        assert getattr(again, name) == getattr(ledger, name), name
    assert again.training_split() == ledger.training_split()
    # It goes on where the first left off, with the same limits.
    for one in (ledger, again):
        one.append_observation([3])
        with pytest.raises(TokenLedgerError, match="vocabulary"):
            one.append_observation([VOCABULARY])
    assert again.ids == ledger.ids and again.spans == ledger.spans


def test_an_empty_ledger_round_trips() -> None:
    again = TokenLedger.from_bytes(TokenLedger().to_bytes())
    assert again.ids == [] and again.spans == ()
    assert again.training_split() == ([], [], [], [])


def test_spans_say_which_weights_sampled() -> None:
    ledger = TokenLedger()
    ledger.append_prompt([1, 2])
    ledger.append_generation([3], [-0.5], weight_version_start=4, weight_version_end=5, finish_reason="length")
    ledger.append_close([6])
    assert ledger.spans[1:] == (Span(SpanKind.GENERATION, 2, 3, 0, 4, 5, "length"), Span(SpanKind.CLOSE, 3, 4, 1))


@pytest.mark.parametrize(
    ("ids", "logprobs", "message"),
    [
        ([1, 2], [-1.0], "2 sampled ids but 1 logprobs"),
        ([1, 2], [-1.0, -1.0, -1.0], "2 sampled ids but 3 logprobs"),
        ([1], [None], "logprob 0 of 1 is None"),
        ([1, 2], [-1.0, math.nan], "logprob 1 of 2 is nan"),
        ([1], [-math.inf], "logprob 0 of 1 is -inf"),
        ([1], [-1e300], "logprob 0 of 1"),
        ([1, VOCABULARY], [-1.0, -1.0], "id 1000 is outside the vocabulary of 1000"),
        ([-1], [-1.0], "id -1 is outside the vocabulary"),
    ],
)
def test_a_refused_generation_leaves_no_trace(ids: list[int], logprobs: list[Any], message: str) -> None:
    ledger = TokenLedger(VOCABULARY)
    ledger.append_prompt([1])
    before = ledger.to_bytes()
    with pytest.raises(TokenLedgerError, match=message):
        ledger.append_generation(ids, logprobs)
    assert ledger.to_bytes() == before


def test_the_prompt_comes_first_and_once() -> None:
    ledger = TokenLedger()
    others = (ledger.append_close, ledger.append_observation, ledger.append_injected)
    for append in (*others, lambda ids: ledger.append_generation(ids, [0.0])):
        with pytest.raises(TokenLedgerError, match="needs a prompt before it"):
            append([1])
    ledger.append_prompt([1])
    with pytest.raises(TokenLedgerError, match="only be the first span"):
        ledger.append_prompt([1])
    with pytest.raises(TokenLedgerError, match="outside the vocabulary"):
        ledger.append_observation([2**31])
    assert ledger.ids == [1]


def _sample() -> TokenLedger:
    ledger = TokenLedger(VOCABULARY)
    ledger.append_prompt(list(range(40)))
    ledger.append_generation([5, 6, 7], [-0.25, -1.5, -3.0], finish_reason="stop")
    ledger.append_close([8])
    return ledger


@_EXAMPLES
@given(st.data())
def test_damaged_bytes_are_an_error_or_harmless(data: st.DataObject) -> None:
    good = _sample().to_bytes()
    if data.draw(st.booleans()):
        bad = good[: data.draw(st.integers(0, len(good) - 1))]
    else:
        at = data.draw(st.integers(0, len(good) - 1))
        bad = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
    try:
        read = TokenLedger.from_bytes(bad)
    except TokenLedgerError:
        return
    # Some bytes of a zip (a time stamp) mean nothing.
    assert read.ids == _sample().ids and read.logprobs == _sample().logprobs and read.spans == _sample().spans


@_EXAMPLES
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_an_error(data: bytes) -> None:
    for prefix in (b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00"):
        with pytest.raises(TokenLedgerError, match="not a token ledger"):
            TokenLedger.from_bytes(prefix + data)


def _altered(**changes: Any) -> bytes:
    with np.load(io.BytesIO(_sample().to_bytes())) as archive:
        arrays = {name: archive[name] for name in archive.files}
    meta = json.loads(arrays["meta"].tobytes())
    meta.update({k: v for k, v in changes.items() if k in meta})
    arrays.update({k: v for k, v in changes.items() if k in arrays})
    arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def _span(kind: str, start: int, end: int, turn: int = 0) -> dict[str, Any]:
    return {"kind": kind, "start": start, "end": end, "turn": turn}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 99}, "format 99"),
        ({"ids": np.zeros(3, np.int32)}, "do not fit together"),
        ({"ids": np.zeros(44, np.float64)}, r"wrong types: \['ids'\]"),
        ({"ids": np.full(44, VOCABULARY, np.int32)}, "outside the vocabulary"),
        ({"logprobs": np.full(44, np.nan, np.float32)}, "logprob 0 of 3 is nan"),
        ({"provenance": np.ones(44, np.int8)}, "provenance"),
        ({"spans": [_span("prompt", 0, 44)]}, "provenance"),
        ({"spans": [_span("prompt", 0, 40), _span("close", 41, 44)]}, "do not fit together"),
        ({"spans": [_span("close", 0, 44)]}, "needs a prompt"),
        ({"spans": [_span("dream", 0, 44)]}, "not a token ledger"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    assert TokenLedger.from_bytes(_altered()).ids == _sample().ids
    with pytest.raises(TokenLedgerError, match=message):
        TokenLedger.from_bytes(_altered(**changes))


def test_logprobs_are_kept_as_float32() -> None:
    ledger = TokenLedger()
    ledger.append_prompt([0])
    ledger.append_generation([1], [-0.1])
    assert ledger.logprobs == [0.0, array("f", [-0.1])[0]]
