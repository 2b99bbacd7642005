"""A trial's token ledger as the trainer wants it.

Invariants: ids are those the engine sampled, the mask is 1 exactly on sampled ids, logprobs are aligned with
the response. A trial without a sampled token becomes one masked placeholder token, since SkyRL cannot take
an empty response.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deskrl.tokens import TokenLedger, TokenLedgerError


@dataclass(frozen=True)
class Trajectory:
    """Lists of one length for the response; weight versions of its first and last generation, if known."""

    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    weight_versions: tuple[int | None, int | None] = (None, None)

    def masked(self) -> Trajectory:
        """The same tokens with nothing to train on."""
        return Trajectory(self.prompt_ids, self.response_ids, [0] * len(self.mask), self.logprobs, self.weight_versions)


def placeholder(pad_token_id: int) -> Trajectory:
    """Stands for a trial that sampled nothing."""
    return Trajectory([pad_token_id], [pad_token_id], [0], [0.0])


def read_trajectory(path: Path, pad_token_id: int) -> Trajectory:
    """The trajectory in a ledger file; a placeholder if the file is missing or holds no sampled token.

    Raises TokenLedgerError for a file that is there and cannot be read: that is a fault, not an empty trial.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return placeholder(pad_token_id)
    ledger = TokenLedger.from_bytes(data)
    if ledger.sampled == 0:
        return placeholder(pad_token_id)
    prompt, response, mask, logprobs = ledger.training_split()
    if not len(prompt) or not len(response) == len(mask) == len(logprobs):
        raise TokenLedgerError(f"{path}: prompt of {len(prompt)}, response of {len(response)} tokens")
    generations = [span for span in ledger.spans if span.kind == "generation"]
    versions = (generations[0].weight_version_start, generations[-1].weight_version_end)
    return Trajectory(list(prompt), list(response), [int(m) for m in mask], [float(p) for p in logprobs], versions)
