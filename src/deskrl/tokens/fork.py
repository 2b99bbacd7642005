"""Trees of forked ledgers: what each branch trains on, and their one file.

Model: every ledger of a tree is a path from its root; it owns the tokens appended to it and shares the others
with its parent. A parent that a fork continues from its very end is part of that fork and no branch of its own.

Invariants:
- a sampled token of the tree has mask 1 in exactly one exported branch, the first that holds it;
- the ids of a branch are those of its ledger up to its last trained token;
- the file holds every token once, in the ledger that owns it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from deskrl.tokens.ledger import TokenLedger
from deskrl.tokens.storage import Columns, TokenLedgerError, pack, unpack


@dataclass(frozen=True)
class Branch:
    """One sequence to train on; `response_ids`, `mask` and `logprobs` have equal lengths."""

    ledger: TokenLedger
    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    logprobs: list[float]


class Trajectories:
    """Ledgers and all their forks.

    Args:
        roots: ledgers that are no forks themselves; forks made later belong to the tree as well.
    """

    def __init__(self, *roots: TokenLedger) -> None:
        strays = [n for n, root in enumerate(roots) if root.parent is not None]
        if strays or len({id(root) for root in roots}) != len(roots):
            raise TokenLedgerError(f"of {len(roots)} roots, those at {strays} are forks or one is given twice")
        self.roots = roots

    @property
    def ledgers(self) -> list[TokenLedger]:
        """Every ledger, a parent before its forks, older forks before younger ones."""
        found: list[TokenLedger] = []
        waiting = list(reversed(self.roots))
        while waiting:
            ledger = waiting.pop()
            found.append(ledger)
            waiting.extend(reversed(ledger.forks))
        return found

    def branches(self) -> list[Branch]:
        """What to train on; a branch without a sampled token of its own is left out."""
        # Of each ledger: up to which position an earlier branch trains its tokens.
        trained: dict[int, int] = {}
        found: list[Branch] = []
        for ledger in self.ledgers:
            if any(fork.shared == len(ledger) > 0 for fork in ledger.forks):
                continue
            fresh = np.zeros(len(ledger), dtype=bool)
            owner: TokenLedger | None = ledger
            end = len(ledger)
            while owner is not None:
                start = max(owner.shared, trained.get(id(owner), 0))
                fresh[start:end] = True
                trained[id(owner)] = max(start, end)
                end = min(end, owner.shared)
                owner = owner.parent
            mask = np.array(ledger.loss_mask, dtype=bool) & fresh
            if not mask.any():
                continue
            begin, stop = ledger.spans[0].end, int(mask.nonzero()[0][-1]) + 1
            found.append(
                Branch(
                    ledger,
                    ledger.ids[:begin],
                    ledger.ids[begin:stop],
                    [int(m) for m in mask[begin:stop]],
                    ledger.logprobs[begin:stop],
                )
            )
        return found

    def to_bytes(self) -> bytes:
        """The trees as one compressed npz (exact round trip with `from_bytes`)."""
        ledgers = self.ledgers
        place = {id(ledger): n for n, ledger in enumerate(ledgers)}
        branches: list[dict[str, Any]] = []
        for ledger in ledgers:
            parent = None if ledger.parent is None else place[id(ledger.parent)]
            descent = {"parent": parent, "shared": ledger.shared, "shared_spans": ledger._shared_spans}
            branches.append({**descent, **ledger._meta(ledger._shared_spans)})
        owned = [ledger._columns(ledger.shared) for ledger in ledgers]
        empty = TokenLedger()._columns(0)
        columns = Columns(
            np.concatenate([empty.ids, *(part.ids for part in owned)]),
            np.concatenate([empty.logprobs, *(part.logprobs for part in owned)]),
            np.concatenate([empty.provenance, *(part.provenance for part in owned)]),
        )
        return pack({"branches": branches}, columns)

    @classmethod
    def from_bytes(cls, data: bytes) -> Trajectories:
        """Reads what `to_bytes` wrote, or the file of a single ledger.

        Raises:
            TokenLedgerError: see `TokenLedger.from_bytes`; also a fork of a ledger that does not come before it.
        """
        meta, columns = unpack(data)
        if "branches" not in meta:
            return cls(TokenLedger.from_bytes(data))
        ledgers: list[TokenLedger] = []
        start = 0
        for number, record in enumerate(meta["branches"]):
            try:
                ledger = _start(record, ledgers)
                spans = record["spans"]
                end = start + (int(spans[-1]["end"]) - len(ledger) if spans else 0)
            except (KeyError, TypeError, ValueError, IndexError) as error:
                problem = error if isinstance(error, TokenLedgerError) else f"{type(error).__name__}: {error}"
                raise TokenLedgerError(f"branch {number} of the file: {problem}") from error
            ledger._restore(record, columns.part(start, max(start, end)))
            ledgers.append(ledger)
            start = end
        if start != len(columns):
            raise TokenLedgerError(f"ledger arrays do not fit together: {len(columns)} tokens, branches hold {start}")
        return cls(*(ledger for ledger in ledgers if ledger.parent is None))


def _start(record: dict[str, Any], earlier: list[TokenLedger]) -> TokenLedger:
    """The ledger of a stored branch with what it shares, before its own spans."""
    number, shared, spans = record["parent"], record["shared"], record["shared_spans"]
    if number is None:
        if shared or spans:
            raise TokenLedgerError(f"a root that shares {shared} tokens, {spans} spans")
        return TokenLedger()
    if not 0 <= number < len(earlier):
        raise TokenLedgerError(f"forked from branch {number}, which does not come before it")
    parent = earlier[number]
    known = parent.spans[:spans]
    if not 0 <= spans <= len(parent.spans) or not (known[-1].start if known else 0) <= shared <= len(parent):
        raise TokenLedgerError(f"forked at {shared} after {spans} spans of a ledger of {len(parent)} tokens")
    if shared != min(shared, known[-1].end if known else 0):
        raise TokenLedgerError(f"forked at {shared}, but its {spans} shared spans end before")
    return parent._fork(shared, spans)
