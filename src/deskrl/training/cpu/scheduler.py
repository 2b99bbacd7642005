"""Continuous batching for the embedded engine: one thread that owns the model and all its state.

Each round: run control jobs, drop what was cancelled, advance one prefill by a chunk, decode one token
for every running sequence. A request therefore joins the batch after its own prefill, whatever else runs.

Invariants: running sequences occupy rows 0..n-1 and the one being prefilled, if any, row n. Everything
that touches the model or the rows runs on the scheduler's thread, so a control job (pause, weight reload)
always falls between two steps. Paused with `keep`, sequences stay as they are; after a reload they go on
over the keys they have. A key/value copy enters the prefix cache only if one weight version made it all.
"""

import logging
import random
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch

from deskrl.training.cpu.kv import PrefixCache, common_prefix
from deskrl.training.cpu.runner import Draw, Runner, Sampling

PauseMode = Literal["keep", "abort", "wait"]
PREFILL_CHUNK = 256
"""Tokens of prefill between two decode steps: long enough to be efficient, short enough not to stall."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Sequence:
    """One request: its tokens so far, and its result when `done` resolves (to the sequence itself)."""

    prompt: list[int]
    sampling: Sampling
    seed: int | None = None
    done: "Future[Sequence]" = field(default_factory=Future)
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    version_start: int | None = None
    version_end: int | None = None
    cached_tokens: int = 0
    cancelled: bool = False
    in_kv: int = 0
    kv_version: int = -1
    stream: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.stream = random.Random(random.getrandbits(64) if self.seed is None else self.seed)
        self.done.set_running_or_notify_cancel()  # from here on only the scheduler settles it

    @property
    def tokens(self) -> np.ndarray:
        """Prompt and output ids."""
        return np.array(self.prompt + self.output, dtype=np.int64)


class Scheduler:
    """Runs sequences on a Runner. `submit` and `call` are safe from any thread."""

    def __init__(self, runner: Runner, max_batch: int, prefix_cache_bytes: int) -> None:
        self.runner = runner
        self.max_batch = max_batch
        self.version = 0
        self.paused = False
        self.prefixes = PrefixCache(prefix_cache_bytes)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._prefilling: Sequence | None = None
        self._jobs: deque[Callable[[], None]] = deque()
        self._drained: list[Future[None]] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="scheduler", daemon=True)
        self._thread.start()

    def submit(self, sequence: Sequence) -> "Future[Sequence]":
        """Queue a sequence; its future resolves when it finishes, with finish_reason set."""
        with self._wake:
            self._waiting.append(sequence)
            self._wake.notify()
        return sequence.done

    def cancel(self, sequence: Sequence) -> None:
        """Give up a sequence: its row is free after the current step; it finishes as `abort`."""
        with self._wake:
            sequence.cancelled = True
            self._wake.notify()

    def call(self, job: Callable[[], T]) -> "Future[T]":
        """Run `job` on the scheduler's thread between two steps, paused or not."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(job())
            except Exception as error:
                future.set_exception(error)

        with self._wake:
            self._jobs.append(run)
            self._wake.notify()
        return future

    def stop(self) -> None:
        """Stop after the current step; unfinished futures stay unresolved."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def load(self) -> dict[str, int]:
        """How many sequences run, wait and are cached, and the weight version; a momentary view."""
        waiting = len(self._waiting) + (self._prefilling is not None)
        return {"running": len(self._running), "waiting": waiting, "weight_version": self.version}

    # Control jobs, for `call`.

    def pause(self, mode: PauseMode) -> "Future[None]":
        """Stop stepping; the returned future resolves once that is so.

        `keep` leaves sequences as they are, `abort` ends them, `wait` first lets the running ones finish.
        """
        drained: Future[None] = Future()
        drained.set_running_or_notify_cancel()
        if mode == "abort":
            with self._wake:
                aborted = [*self._running, *self._held(), *self._waiting]
                self._running, self._prefilling = [], None
                self._waiting.clear()
            for sequence in aborted:
                self._finish(sequence, "abort")
        if mode == "wait" and (self._running or self._prefilling):
            self._drained.append(drained)
        else:
            self.paused = True
            drained.set_result(None)
        return drained

    def resume(self) -> None:
        """Go on stepping; also calls off a pause that still waits for sequences to finish."""
        self.paused = False
        self._resolve_drained()

    def reload(self, folder: Path) -> int:
        """Load new weights, forget cached prefixes; returns the new version."""
        self.runner.load_weights(folder)
        self.prefixes.clear()
        self.version += 1
        return self.version

    def reset_prefixes(self, recompute_running: bool) -> None:
        """Forget cached prefixes; with `recompute_running`, also the keys of running sequences."""
        self.prefixes.clear()
        if recompute_running:
            with self._wake:
                self._waiting.extendleft(reversed([*self._running, *self._held()]))
                self._running, self._prefilling = [], None

    # The loop; all below runs on the scheduler's thread.

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopping or self._jobs or self._has_work())
                if self._stopping:
                    return
                jobs, self._jobs = self._jobs, deque()
            for job in jobs:
                job()
            self._drop_cancelled()
            if self.paused:
                continue
            try:
                self._prefill()
                self._decode()
            except Exception as error:  # a bug or no memory: fail the requests, keep the engine
                _log.exception("step failed")
                for sequence in [*self._running, *self._held()]:
                    sequence.done.set_exception(error)
                self._running, self._prefilling = [], None
            if self._drained and not (self._running or self._prefilling):
                self.paused = True
                self._resolve_drained()

    def _has_work(self) -> bool:
        pending = [*self._running, *self._held(), *self._waiting]
        return any(s.cancelled for s in pending) or bool(pending and not self.paused)

    def _held(self) -> list[Sequence]:
        return [self._prefilling] if self._prefilling else []

    def _resolve_drained(self) -> None:
        for future in self._drained:
            future.set_result(None)
        self._drained.clear()

    def _drop_cancelled(self) -> None:
        with self._wake:
            dropped = [s for s in [*self._waiting, *self._held(), *self._running] if s.cancelled]
            self._waiting = deque(s for s in self._waiting if not s.cancelled)
        for sequence in dropped:
            if sequence in self._running:
                self._free_row(sequence)
            elif sequence is self._prefilling:
                self._prefilling = None
            self._finish(sequence, "abort")

    def _prefill(self) -> None:
        """Advance the prefill by one chunk, starting the next waiting sequence's if none is under way."""
        if self._prefilling is None:
            if not self._waiting or self._drained or len(self._running) == self.max_batch:
                return
            with self._wake:
                self._prefilling = self._waiting.popleft()
            self._start(self._prefilling)
        sequence, row = self._prefilling, len(self._running)
        tokens = sequence.tokens
        end = min(len(tokens), sequence.in_kv + PREFILL_CHUNK)
        ids = torch.from_numpy(tokens[None, sequence.in_kv : end])
        logits = self.runner.forward(row, ids, torch.arange(sequence.in_kv, end)[None])
        sequence.in_kv = end
        if end == len(tokens):
            self._running.append(sequence)
            self._prefilling = None
            self._sample(logits, [sequence])

    def _start(self, sequence: Sequence) -> None:
        """Fill the row from the longest known prefix, of a running sequence or of the cache."""
        row, tokens = len(self._running), sequence.tokens
        if sequence.version_start is None:
            sequence.version_start = self.version
        sequence.kv_version = self.version
        sequence.in_kv, kv = self.prefixes.find(tokens)
        source = -1
        for i, other in enumerate(self._running):
            shared = min(common_prefix(other.tokens, tokens), other.in_kv)
            if other.kv_version == self.version and shared > sequence.in_kv:
                sequence.in_kv, source = shared, i
        # The last token is always computed: its logits are what the first sample needs.
        sequence.in_kv = min(sequence.in_kv, len(tokens) - 1)
        sequence.cached_tokens = sequence.in_kv
        if source >= 0:
            self.runner.kv.move(source, row, sequence.in_kv)
        elif kv is not None:
            self.runner.kv.write(row, kv, sequence.in_kv)

    def _decode(self) -> None:
        """One token for every running sequence."""
        if not (batch := list(self._running)):
            return
        ids = torch.tensor([[s.output[-1]] for s in batch])
        positions = torch.tensor([[s.in_kv] for s in batch])
        logits = self.runner.forward(0, ids, positions)
        for sequence in batch:
            sequence.in_kv += 1
        self._sample(logits, batch)

    def _sample(self, logits: torch.Tensor, batch: list[Sequence]) -> None:
        draws = [Draw(s.sampling, len(s.output), s.stream) for s in batch]
        for sequence, token, logprob in zip(batch, *self.runner.sample(logits, draws), strict=True):
            sequence.output.append(token)
            sequence.logprobs.append(logprob)
            if token in sequence.sampling.stop_ids:
                self._retire(sequence, "stop")
            elif len(sequence.output) >= sequence.sampling.max_tokens:
                self._retire(sequence, "length")

    def _retire(self, sequence: Sequence, reason: str) -> None:
        if sequence.kv_version == self.version:
            kv = self.runner.kv.read(self._running.index(sequence), sequence.in_kv)
            self.prefixes.put(sequence.tokens[: sequence.in_kv], kv)
        self._free_row(sequence)
        self._finish(sequence, reason)

    def _free_row(self, sequence: Sequence) -> None:
        """Take a running sequence out; the last one moves into its row, the prefilling one down by one."""
        row, last = self._running.index(sequence), len(self._running) - 1
        moved = self._running.pop()
        if row != last:
            self.runner.kv.move(last, row, moved.in_kv)
            self._running[row] = moved
        if self._prefilling:
            self.runner.kv.move(last + 1, last, self._prefilling.in_kv)

    def _finish(self, sequence: Sequence, reason: str) -> None:
        sequence.finish_reason = reason
        sequence.version_end = self.version
        if sequence.version_start is None:
            sequence.version_start = self.version
        sequence.done.set_result(sequence)
