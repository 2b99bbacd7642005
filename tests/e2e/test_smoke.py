"""`deskrl smoke` with the tiny model, once, and everything it must have left behind, looked at from outside."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Deskrl

from deskrl.tokens import TokenLedger

pytestmark = pytest.mark.e2e
STEPS = 2


@dataclass
class Run:
    folder: Path
    code: int
    text: str
    leftovers: list[str]

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("smoke")
    arguments = ["smoke", "--model", "tiny", "--steps", str(STEPS), "--run-dir", str(folder / "run")]
    deskrl = Deskrl([*arguments, "generator.desk.engine.record=true", "trainer.dump_data_batch=true"], folder)
    code = deskrl.wait(1500)
    yield Run(folder / "run", code, deskrl.text(), deskrl.leftovers())
    deskrl.kill()


def test_it_says_that_all_is_well(run: Run) -> None:
    assert run.code == 0, run.text + (run.folder / "logs" / "train.log").read_text()[-3000:]
    assert "FAIL" not in run.text
    for place in ("trials.jsonl", "metrics.jsonl", "checkpoints", "config.yaml", "logs/train.log"):
        assert str(run.folder / place) in run.text and (run.folder / place).exists()


def test_nothing_is_left_running_or_lying_about(run: Run) -> None:
    assert run.leftovers == []


def rows(batch: Any) -> Iterator[tuple[list[int], list[int], list[float]]]:
    """Ids, loss mask and logprobs of each real token of a dumped training batch."""
    for sequence, attention, mask, logprobs in zip(
        batch["sequences"], batch["attention_mask"], batch["loss_mask"], batch["rollout_logprobs"], strict=True
    ):
        length = len(sequence)
        whole_mask, whole_logprobs = torch.zeros(length), torch.zeros(length)
        whole_mask[length - len(mask) :], whole_logprobs[length - len(mask) :] = mask, logprobs
        real = attention.bool()
        yield sequence[real].tolist(), whole_mask[real].int().tolist(), whole_logprobs[real].tolist()


def test_what_trained_is_what_the_engine_sampled(run: Run) -> None:
    sampled = run.lines("logs/engine-record.jsonl")
    dumps = sorted((run.folder / "export" / "dumped_data").glob("*.pkl"))
    assert len(dumps) == STEPS + 1
    trained_tokens = 0
    for dump in dumps:
        for ids, mask, logprobs in rows(pickle.loads(dump.read_bytes())):
            if not any(mask):
                continue  # a group whose rewards were all equal
            # Every request this conversation made: its prompt is a prefix of the row.
            turns = [
                r for r in sampled if ids[: len(r["prompt"]) + len(r["token_ids"])] == r["prompt"] + r["token_ids"]
            ]
            assert turns
            expected_mask, expected = [0] * len(ids), [0.0] * len(ids)
            for turn in turns:
                start = len(turn["prompt"])
                expected_mask[start : start + len(turn["token_ids"])] = [1] * len(turn["token_ids"])
                expected[start : start + len(turn["token_ids"])] = turn["logprobs"]
            assert mask == expected_mask
            assert logprobs == pytest.approx(expected, abs=1e-6)
            trained_tokens += sum(mask)
    assert trained_tokens > 100


def test_every_ledger_is_the_engines_record(run: Run) -> None:
    sampled = {(tuple(r["prompt"]), tuple(r["token_ids"])) for r in run.lines("logs/engine-record.jsonl")}
    trials = run.lines("trials.jsonl")
    assert len(trials) >= (STEPS + 1) * 8
    for trial in trials:
        ledger = TokenLedger.from_bytes(Path(trial["path"], "agent", "tokens.npz").read_bytes())
        for span in ledger.spans:
            if span.kind == "generation":
                assert (tuple(ledger.ids[: span.start]), tuple(ledger.ids[span.start : span.end])) in sampled


def test_the_engine_serves_new_weights_after_each_update(run: Run) -> None:
    trials = run.lines("trials.jsonl")
    versions: dict[str, set[int]] = {"train": set(), "eval": set()}
    for trial in trials:
        ledger = TokenLedger.from_bytes(Path(trial["path"], "agent", "tokens.npz").read_bytes())
        versions[trial["phase"]] |= {s.weight_version_end for s in ledger.spans if s.weight_version_end is not None}
    assert len(versions["train"]) >= 2
    # The evaluation comes after the resumed run's only update: the first sync, then that one.
    assert versions["eval"] == {2}
    gap = next(m["eval/logprob_abs_diff_mean"] for m in run.lines("metrics.jsonl") if "eval/logprob_abs_diff_mean" in m)
    assert 0 < gap < 0.05


def weights(run: Run, step: int) -> dict[str, torch.Tensor]:
    folder = run.folder / "checkpoints" / f"global_step_{step}" / "policy"
    (file,) = folder.glob("model_world_size_1_rank_0.pt")
    state = torch.load(file, weights_only=False)
    return {k: getattr(v, "_local_tensor", v) for k, v in state.items()}


def test_the_resumed_step_changed_the_weights_of_the_checkpoint(run: Run) -> None:
    before, after = weights(run, STEPS), weights(run, STEPS + 1)
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_trials_are_graded_by_the_rubric_and_labelled(run: Run) -> None:
    trials = run.lines("trials.jsonl")
    assert {trial["outcome"] for trial in trials} <= {
        "answer",
        "length",
        "context_length",
        "max_turns",
        "malformed_tool_call",
    }
    assert len({trial["reward"] for trial in trials}) >= 2
    grading = json.loads(Path(trials[0]["path"], "verifier", "grading.json").read_text())
    assert "offline" in json.dumps(grading)


def test_a_finished_run_is_not_overwritten(run: Run, tmp_path: Path) -> None:
    deskrl = Deskrl(["smoke", "--model", "tiny", "--run-dir", str(run.folder)], tmp_path)
    assert deskrl.wait(60) == 2
    assert "already holds a run" in deskrl.text()
