"""Forks: a shared prefix, branches of their own, every sampled token trained exactly once, one file."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deskrl.tokens import SpanKind, TokenLedger, TokenLedgerError
from deskrl.tokens.fork import Trajectories

VOCABULARY = 10_000
_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 12), st.floats(-2, 12), st.sampled_from(["", "x", [], {}, [1], [{}]])
)
_EXAMPLES = settings(deadline=None, max_examples=60)
Path = list[tuple[int, int]]
"""Tokens of a ledger as (number, sampled): numbers are unique in a forest."""


def _grow(ledger: TokenLedger, kind: SpanKind, ids: list[int]) -> None:
    if kind is SpanKind.GENERATION:
        version = ids[0] if ids else None
        ledger.append_generation(ids, [-i / 8 for i in ids], weight_version_start=version, finish_reason="stop")
    else:
        appends = {
            SpanKind.PROMPT: ledger.append_prompt,
            SpanKind.CLOSE: ledger.append_close,
            SpanKind.OBSERVATION: ledger.append_observation,
            SpanKind.INJECTED: ledger.append_injected,
        }
        appends[kind](ids)


@st.composite
def forests(draw: st.DrawFn) -> tuple[Trajectories, list[tuple[TokenLedger, Path]]]:
    """A random forest, and its ledgers with the paths that they must hold."""
    counter = iter(range(VOCABULARY))
    later = [SpanKind.GENERATION, *(kind for kind in SpanKind if kind is not SpanKind.PROMPT)]
    ledgers: list[tuple[TokenLedger, Path]] = [(TokenLedger(VOCABULARY), []) for _ in range(draw(st.integers(1, 2)))]
    roots = [ledger for ledger, _ in ledgers]
    for _ in range(draw(st.integers(0, 25))):
        ledger, path = draw(st.sampled_from(ledgers))
        if draw(st.integers(0, 3)) == 0:
            at = draw(st.integers(0, len(ledger)))
            ledgers.append((ledger.fork(at), path[:at]))
            continue
        kind = SpanKind.PROMPT if not ledger.spans else draw(st.sampled_from(later))
        ids = [next(counter) for _ in range(draw(st.integers(0, 4)))]
        _grow(ledger, kind, ids)
        path += [(i, int(kind is SpanKind.GENERATION)) for i in ids]
    return Trajectories(*roots), ledgers


@_EXAMPLES
@given(forests())
def test_every_sampled_token_trains_in_exactly_one_branch(forest: Any) -> None:
    trees, ledgers = forest
    paths = {id(ledger): path for ledger, path in ledgers}
    assert len(trees.ledgers) == len(ledgers)
    trained: Counter[int] = Counter()
    branches = trees.branches()
    seen: set[int] = set()
    for branch in branches:
        path = paths[id(branch.ledger)]
        assert len(branch.response_ids) == len(branch.mask) == len(branch.logprobs)
        ids = branch.prompt_ids + branch.response_ids
        assert ids == [i for i, _ in path[: len(ids)]]
        assert branch.mask[-1] == 1
        prompt = len(branch.prompt_ids)
        for n, (i, mask, logprob) in enumerate(zip(branch.response_ids, branch.mask, branch.logprobs, strict=True)):
            sampled = path[prompt + n][1]
            assert logprob == (-i / 8 if sampled else 0.0)
            # Trained if sampled and in no earlier branch: the first that holds it.
            assert mask == int(sampled and i not in seen)
        trained.update(i for i, mask in zip(branch.response_ids, branch.mask, strict=True) if mask)
        seen |= {i for i, sampled in path if sampled}
    assert trained == Counter({i for path in paths.values() for i, sampled in path if sampled})


@_EXAMPLES
@given(forests())
def test_each_ledger_holds_its_path(forest: Any) -> None:
    for ledger, path in forest[1]:
        assert ledger.ids == [i for i, _ in path]
        assert ledger.loss_mask == [sampled for _, sampled in path]
        assert [s.start for s in ledger.spans] == [0, *(s.end for s in ledger.spans)][: len(ledger.spans)]
        assert (ledger.spans[-1].end if ledger.spans else 0) == len(path)
        assert ledger.turns == sum(s.kind is SpanKind.GENERATION for s in ledger.spans)
        # A fork is a whole ledger: its own file, without its parent.
        again = TokenLedger.from_bytes(ledger.to_bytes())
        assert again.spans == ledger.spans and again.ids == ledger.ids and again.logprobs == ledger.logprobs


@_EXAMPLES
@given(forests())
def test_a_forest_is_an_exact_round_trip(forest: Any) -> None:
    trees, _ = forest
    data = trees.to_bytes()
    again = Trajectories.from_bytes(data)
    place = {id(ledger): n for n, ledger in enumerate(trees.ledgers)}
    place_again = {id(ledger): n for n, ledger in enumerate(again.ledgers)}
    assert len(place) == len(place_again)
    for one, two in zip(trees.ledgers, again.ledgers, strict=True):
        for name in ("ids", "loss_mask", "logprobs", "provenance", "spans", "turns", "shared"):
            assert getattr(one, name) == getattr(two, name), name
        assert place.get(id(one.parent)) == place_again.get(id(two.parent))
    export = [(b.prompt_ids, b.response_ids, b.mask, b.logprobs) for b in trees.branches()]
    assert export == [(b.prompt_ids, b.response_ids, b.mask, b.logprobs) for b in again.branches()]
    assert again.to_bytes() == data
    # Each token is stored once.
    with np.load(io.BytesIO(data)) as archive:
        stored = archive["ids"].tolist()
    assert sorted(stored) == sorted({i for ledger in trees.ledgers for i in ledger.ids})


def _compaction() -> tuple[TokenLedger, TokenLedger]:
    """Two turns; then the first is kept and the second replaced by a summary, from which a third goes on."""
    ledger = TokenLedger(VOCABULARY)
    ledger.append_prompt([1, 2])
    ledger.append_generation([3, 4], [-0.5, -0.25], weight_version_start=7, weight_version_end=7, finish_reason="stop")
    ledger.append_close([5])
    kept = len(ledger)
    ledger.append_observation([6])
    ledger.append_generation([8], [-1.0], finish_reason="length")
    compacted = ledger.fork(kept)
    compacted.append_injected([9])
    compacted.append_generation([10, 11], [-2.0, -3.0])
    return ledger, compacted


def test_after_a_compaction_the_shared_response_trains_once() -> None:
    ledger, compacted = _compaction()
    first, second = Trajectories(ledger).branches()
    assert (first.ledger, first.prompt_ids, first.response_ids) == (ledger, [1, 2], [3, 4, 5, 6, 8])
    assert first.mask == [1, 1, 0, 0, 1] and first.logprobs == [-0.5, -0.25, 0.0, 0.0, -1.0]
    assert (second.ledger, second.prompt_ids, second.response_ids) == (compacted, [1, 2], [3, 4, 5, 9, 10, 11])
    assert second.mask == [0, 0, 0, 0, 1, 1] and second.logprobs == [-0.5, -0.25, 0.0, 0.0, -2.0, -3.0]
    # By itself, the fork is an ordinary ledger in which everything it holds can train.
    assert compacted.training_split() == ([1, 2], [3, 4, 5, 9, 10, 11], [1, 1, 0, 0, 1, 1], second.logprobs)


def test_a_sub_agent_has_a_prompt_of_its_own() -> None:
    ledger = TokenLedger(VOCABULARY)
    ledger.append_prompt([1])
    ledger.append_generation([2], [-1.0])
    worker = ledger.fork(0)
    worker.append_prompt([7])
    worker.append_generation([8], [-2.0])
    branches = Trajectories(ledger).branches()
    assert [(b.prompt_ids, b.response_ids, b.mask) for b in branches] == [([1], [2], [1]), ([7], [8], [1])]


def test_a_parent_that_a_fork_continues_is_no_branch_of_its_own() -> None:
    ledger = TokenLedger(VOCABULARY)
    ledger.append_prompt([1])
    ledger.append_generation([2], [-1.0])
    on = ledger.fork(len(ledger))
    on.append_injected([3])
    on.append_generation([4], [-1.0])
    (branch,) = Trajectories(ledger).branches()
    assert branch.ledger is on and branch.response_ids == [2, 3, 4] and branch.mask == [1, 0, 1]


def test_a_fork_within_a_generation_keeps_what_was_sampled_before_it() -> None:
    ledger, _ = _compaction()
    cut = ledger.fork(3)
    span = cut.spans[-1]
    assert (span.kind, span.start, span.end, span.weight_version_start) == (SpanKind.GENERATION, 2, 3, 7)
    assert span.finish_reason is None and cut.turns == 1 and cut.logprobs == [0.0, 0.0, -0.5]
    assert ledger.spans[1].end == 4 and ledger.spans[1].finish_reason == "stop"


@pytest.mark.parametrize("at", [-1, 8])
def test_a_fork_elsewhere_is_refused(at: int) -> None:
    ledger, _ = _compaction()
    with pytest.raises(TokenLedgerError, match=f"cannot fork at {at}, the ledger has 7 tokens"):
        ledger.fork(at)
    assert len(ledger.forks) == 1


def test_roots_are_no_forks_and_different() -> None:
    ledger, compacted = _compaction()
    with pytest.raises(TokenLedgerError, match=r"of 2 roots, those at \[1\] are forks"):
        Trajectories(ledger, compacted)
    with pytest.raises(TokenLedgerError, match="twice"):
        Trajectories(ledger, ledger)


def test_a_single_ledger_reads_as_a_forest_but_not_the_reverse() -> None:
    ledger, _ = _compaction()
    (again,) = Trajectories.from_bytes(ledger.to_bytes()).ledgers
    assert again.ids == ledger.ids
    with pytest.raises(TokenLedgerError, match="tree of forks"):
        TokenLedger.from_bytes(Trajectories(ledger).to_bytes())


def _altered(branch: int, **changes: Any) -> bytes:
    with np.load(io.BytesIO(Trajectories(_compaction()[0]).to_bytes())) as archive:
        arrays = {name: archive[name] for name in archive.files}
    meta = json.loads(arrays["meta"].tobytes())
    meta["branches"][branch].update(changes)
    arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("branch", "changes", "message"),
    [
        (1, {"parent": 1}, "branch 1 .*forked from branch 1"),
        (1, {"parent": 5}, "branch 1 .*forked from branch 5"),
        (1, {"parent": None}, "branch 1 .*a root that shares 5 tokens"),
        (1, {"parent": "x"}, "branch 1 .*TypeError"),
        (1, {"shared": 8}, "branch 1 .*forked at 8"),
        (1, {"shared": 4}, "do not fit|spans disagree"),
        (1, {"shared": 6}, "branch 1 .*end before"),
        (1, {"shared_spans": 9}, "branch 1 .*after 9 spans"),
        (1, {"spans": []}, "branches hold 7"),
        (0, {"spans": []}, "branch 1|do not fit"),
        (0, {"vocabulary_size": 5}, "outside the vocabulary of 5"),
        (0, {"vocabulary_size": "x"}, "a vocabulary of 'x'"),
    ],
)
def test_a_forest_that_contradicts_itself_is_refused(branch: int, changes: dict[str, Any], message: str) -> None:
    assert len(Trajectories.from_bytes(_altered(1)).ledgers) == 2
    with pytest.raises(TokenLedgerError, match=message):
        Trajectories.from_bytes(_altered(branch, **changes))


@_EXAMPLES
@given(st.data())
def test_any_change_of_a_forest_file_is_an_error_or_a_whole_forest(data: st.DataObject) -> None:
    branch = data.draw(st.integers(0, 1))
    key = data.draw(st.sampled_from(["parent", "shared", "shared_spans", "vocabulary_size", "spans"]))
    value = data.draw(_VALUES)
    if key == "spans" and data.draw(st.booleans()):
        tree = Trajectories(_compaction()[0])
        value = [asdict(span) for span in tree.ledgers[branch].spans][3 * branch :]
        field = data.draw(st.sampled_from(["kind", "start", "end", "turn", "weight_version_start", "finish_reason"]))
        value[data.draw(st.integers(0, len(value) - 1))][field] = data.draw(_VALUES)
    try:
        read = Trajectories.from_bytes(_altered(branch, **{key: value}))
    except TokenLedgerError:
        return
    again = Trajectories.from_bytes(read.to_bytes())
    assert [ledger.spans for ledger in again.ledgers] == [ledger.spans for ledger in read.ledgers]
    assert [ledger.ids for ledger in read.ledgers] == [[1, 2, 3, 4, 5, 6, 8], [1, 2, 3, 4, 5, 9, 10, 11]]
