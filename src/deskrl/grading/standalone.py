"""The grader that ships inside a task: standard library only, Python 3.9 or later, one file.

    python3 -I /tests/grade.py --trajectory /logs/agent/trajectory.json \
        --verifiers /tests/verifiers.json --filesystem /filesystem --out /logs/verifier

Model: a task's verifiers are criteria. Each is judged from the final answer and the files of the world by
the deterministic check in `verifier_values.offline`; the reward is the mean of the criteria's scores.

Invariants
- Exactly one of `reward.json` (with `grading.json`) and `grading_error.json` exists when it ends. A
  judge that could not judge, a missing trajectory or malformed verifiers is an error (exit 3), never 0.
- Whatever lay in the output directory under those names before is removed first: an agent may have
  written a reward of its own.
- Files are written to a temporary name and renamed, `reward.json` last.
- Same input, same output: no clock, no network, no randomness.
- A hostile answer cannot stall it: a pattern sees at most 20,000 characters and has a deadline.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
from typing import Any, Dict, List, NamedTuple, Optional, Tuple  # noqa: UP035  (Python 3.9)

JUDGE = "offline-deterministic"
GRADING_VERSION = 1
MAX_REGEX_CHARS = 20_000
REGEX_SECONDS = 2.0
OUTPUTS = ("reward.json", "reward.txt", "grading.json", "grading_error.json")

_NUMBER = re.compile(r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,3}(?![\w.]))?|\.\d+")
_BEFORE = re.compile(r"(?:^|(?<![\w.]))(\()?\s?([-+\u2212])?\s?(?:[$\u20ac\u00a3\u00a5]|[A-Z]{3}\s?)?\s?([-+\u2212])?$")
_AFTER = re.compile(r"\s?(%|percent\b|per cent\b|thousand\b|million\b|billion\b|mm\b|mn\b|bn\b|[kKmMbB]\b)?\s?(\))?")
_SCALES = {
    "thousand": 1e3, "k": 1e3, "million": 1e6, "mm": 1e6, "mn": 1e6, "m": 1e6,
    "billion": 1e9, "bn": 1e9, "b": 1e9,
}  # fmt: skip


class GradingFailure(Exception):
    """Grading that could not be done; `kind` is machine-readable and goes into grading_error.json."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class Criterion(NamedTuple):
    """One verifier as the grader needs it. `offline_negative` holds what must not be found."""

    verifier_id: str
    criteria: str
    is_primary_objective: bool
    negated: bool
    offline: Optional[Dict[str, Any]]  # noqa: UP006, UP045
    offline_negative: Optional[Dict[str, Any]]  # noqa: UP006, UP045
    unjudgeable: str


class Finding(NamedTuple):
    """Whether a check holds, and why."""

    holds: bool
    rationale: str


# --- reading ---------------------------------------------------------------------------------------


def load_json(path: str, kind: str) -> Any:
    """Return the parsed JSON file. Raises `GradingFailure` of `{kind}_missing` or `{kind}_malformed`."""
    try:
        with open(path, encoding="utf-8") as stream:
            return json.load(stream)
    except FileNotFoundError:
        raise GradingFailure(f"{kind}_missing", f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise GradingFailure(f"{kind}_malformed", f"{path}: {error}") from None


def final_answer(trajectory: Any) -> str:
    """Return the last assistant message that is text and calls no tool; empty when there is none.

    Raises `GradingFailure` when the trajectory is not `{messages: [...]}`.
    """
    messages = trajectory.get("messages") if isinstance(trajectory, dict) else None
    if not isinstance(messages, list):
        raise GradingFailure("trajectory_malformed", "trajectory: expected an object with a list 'messages'")
    for message in reversed(messages):
        if not isinstance(message, dict) or message.get("role") != "assistant" or message.get("tool_calls"):
            continue
        if isinstance(message.get("content"), str):
            return str(message["content"])
    return ""


def parse_verifiers(document: Any) -> List[Criterion]:  # noqa: UP006
    """Return the criteria in order. Raises `GradingFailure("verifiers_malformed")` naming the entry."""
    entries = document.get("verifiers") if isinstance(document, dict) else document
    if not isinstance(entries, list) or not entries:
        raise GradingFailure("verifiers_malformed", "verifiers: expected a non-empty list")
    criteria = [_criterion(entry, f"verifiers[{index}]") for index, entry in enumerate(entries)]
    identifiers = [criterion.verifier_id for criterion in criteria]
    for identifier in identifiers:
        if identifiers.count(identifier) > 1:
            raise GradingFailure("verifiers_malformed", f"verifiers: verifier_id {identifier!r} occurs twice")
    return criteria


def _criterion(entry: Any, where: str) -> Criterion:
    def malformed(rule: str) -> GradingFailure:
        return GradingFailure("verifiers_malformed", f"{where}: {rule}")

    if not isinstance(entry, dict):
        raise malformed("expected an object")
    identifier, values = entry.get("verifier_id"), entry.get("verifier_values")
    if not isinstance(identifier, str) or not identifier:
        raise malformed("verifier_id must be a non-empty string")
    if not isinstance(values, dict) or not isinstance(values.get("criteria"), str):
        raise malformed("verifier_values.criteria must be a string")
    checks = {}
    for key in ("offline", "offline_negative"):
        checks[key] = values.get(key)
        if checks[key] is not None:
            problem = check_problem(checks[key])
            if problem:
                raise malformed(f"verifier_values.{key}: {problem}")
    negative = values.get("negative_criteria")
    unjudgeable = ""
    if checks["offline"] is None:
        unjudgeable = "it has no verifier_values.offline check; use an LLM judge"
    elif negative and not isinstance(negative, bool) and checks["offline_negative"] is None:
        unjudgeable = "negative_criteria is text and there is no verifier_values.offline_negative check"
    return Criterion(
        identifier,
        values["criteria"],
        bool(values.get("is_primary_objective", False)),
        negative is True,
        checks["offline"],
        checks["offline_negative"],
        unjudgeable,
    )


def check_problem(check: Any) -> str:
    """Return what is wrong with an offline check, or an empty string."""
    if not isinstance(check, dict):
        return "expected an object with 'kind'"
    kind = check.get("kind")
    fields = {
        "contains": (("text",), ("case_sensitive",)),
        "regex": (("pattern",), ()),
        "number": (("value",), ("tolerance",)),
        "file_exists": (("path",), ("min_bytes",)),
    }
    if kind not in fields:
        return f"kind must be one of {', '.join(fields)}, got {kind!r}"
    required, optional = fields[kind]
    for key in check:
        if key not in (*required, *optional, "kind"):
            return f"unknown key {key!r} for kind {kind!r}; accepted: {', '.join((*required, *optional))}"
    for key in required:
        if key not in check:
            return f"kind {kind!r} needs {key!r}"
    for key in ("text", "pattern", "path"):
        if key in check and not (isinstance(check[key], str) and check[key]):
            return f"{key} must be a non-empty string"
    for key in ("value", "tolerance", "min_bytes"):
        value = check.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return f"{key} must be a finite number"
        if key != "value" and value < 0:
            return f"{key} must not be negative"
    if not isinstance(check.get("case_sensitive", False), bool):
        return "case_sensitive must be true or false"
    if "pattern" in check:
        try:
            re.compile(check["pattern"])
        except (re.error, OverflowError, RecursionError) as error:
            return f"pattern is not a regular expression: {error}"
    if "path" in check and ".." in check["path"].split("/"):
        return "path must not contain '..'"
    return ""


# --- checks ----------------------------------------------------------------------------------------


def run_check(check: Dict[str, Any], answer: str, filesystem: str) -> Finding:  # noqa: UP006
    """Run one well-formed offline check. Raises `GradingFailure("regex_timeout")`."""
    kind = check["kind"]
    if kind == "contains":
        text, wanted = answer, check["text"]
        if not check.get("case_sensitive", False):
            text, wanted = text.casefold(), wanted.casefold()
        holds = wanted in text
        return Finding(holds, f"the answer {'contains' if holds else 'does not contain'} {check['text']!r}")
    if kind == "regex":
        holds = regex_search(check["pattern"], answer[:MAX_REGEX_CHARS])
        return Finding(holds, f"the answer {'matches' if holds else 'does not match'} /{check['pattern']}/")
    if kind == "number":
        value, tolerance = float(check["value"]), float(check.get("tolerance", 0))
        # Decimal inputs such as 0.1 + 0.2 are compared with a hair of slack.
        slack = tolerance + 1e-9 * max(1.0, abs(value))
        numbers = numbers_in(answer)
        holds = any(abs(number - value) <= slack for number in numbers)
        found = "has a number" if holds else "has no number"
        return Finding(holds, f"the answer {found} within {tolerance:g} of {value:.15g}")
    path = check["path"]
    size = regular_file_size(filesystem, path)
    if size is None:
        return Finding(False, f"there is no regular file {path!r}")
    holds = size >= check.get("min_bytes", 0)
    return Finding(holds, f"file {path!r} has {size} bytes")


def numbers_in(text: str) -> List[float]:  # noqa: UP006
    """Return every reading of every number in `text`.

    Understands thousands commas, currency signs and codes, accounting parentheses, signs, exponents,
    scales (k, m, million, bn) and percent. `12%` reads as 12 and 0.12; `$1.2m` as 1.2 and 1,200,000.
    A digit that continues a word (`Q3`) is no number; a comma is never a decimal point.
    """
    readings: List[float] = []  # noqa: UP006
    for match in _NUMBER.finditer(text):
        start = match.start()
        # A match of ".5" right after a digit is the tail of something like "1.2.5".
        if start and match.group()[0] == "." and text[start - 1].isalnum():
            continue
        head = text[max(0, start - 8) : start]
        before = _BEFORE.search(head)
        if before is None:
            if start and (text[start - 1].isalpha() or text[start - 1] == "_"):
                continue
            opened, signs = False, ""
        else:
            opened, signs = bool(before.group(1)), (before.group(2) or "") + (before.group(3) or "")
        after = _AFTER.match(text, match.end())
        unit = (after.group(1) or "").lower() if after else ""
        accounting = opened and after is not None and bool(after.group(2))
        number = float(match.group().replace(",", ""))
        if not math.isfinite(number):
            continue
        if "-" in signs or "\u2212" in signs or accounting:
            number = -number
        readings.append(number)
        if unit in ("%", "percent", "per cent"):
            readings.append(number / 100)
        elif unit in _SCALES:
            readings.append(number * _SCALES[unit])
        if accounting:
            # "(500)" may also be a plain remark in parentheses.
            readings.append(-number)
    return readings


def regular_file_size(root: str, path: str) -> Optional[int]:  # noqa: UP045
    """Return the size in bytes of a regular file under `root`, or None; no symlink is followed."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or ".." in parts:
        return None
    current = root
    for index, part in enumerate(parts):
        current = os.path.join(current, part)
        try:
            status = os.lstat(current)
        except (OSError, ValueError):
            return None
        wanted = stat.S_ISREG if index == len(parts) - 1 else stat.S_ISDIR
        if not wanted(status.st_mode):
            return None
    return status.st_size


def regex_search(pattern: str, text: str, seconds: float = REGEX_SECONDS) -> bool:
    """Return whether `pattern` is found in `text`. Raises `GradingFailure("regex_timeout")`.

    In the main thread an alarm interrupts the matching; elsewhere no signal can, so it runs in a child.
    """
    late = GradingFailure("regex_timeout", f"pattern /{pattern}/ took longer than {seconds:g} s")
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):

        def interrupt(number: int, frame: Any) -> None:
            raise late

        previous = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            return re.search(pattern, text) is not None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
    request = json.dumps({"pattern": pattern, "text": text}).encode("ascii")
    command = [sys.executable, "-I", os.path.abspath(__file__), "--search"]
    try:
        # Starting the interpreter is not the pattern's fault: it gets its own allowance.
        child = subprocess.run(command, input=request, capture_output=True, timeout=seconds + 5)
    except subprocess.TimeoutExpired:
        raise late from None
    if child.returncode == 3:
        raise late
    if child.returncode not in (0, 1):
        raise GradingFailure("internal", f"the pattern's process ended with status {child.returncode}")
    return child.returncode == 0


def _search_child() -> int:
    """Answer one `regex_search` request from standard input: 0 found, 1 not found, 3 too late."""
    request = json.load(sys.stdin)
    try:
        return 0 if regex_search(request["pattern"], request["text"]) else 1
    except GradingFailure:
        return 3


# --- grading ---------------------------------------------------------------------------------------


def judge_criterion(criterion: Criterion, answer: str, filesystem: str) -> Dict[str, Any]:  # noqa: UP006
    """Judge one criterion and return its entry for grading.json.

    `is_criteria_true` says whether the statement of the criterion holds. `score` is 1 when the agent
    earns it: for a negated criterion (`negative_criteria: true`) when the statement does not hold.
    Raises `GradingFailure("criterion_unjudgeable")` without an offline check.
    """
    if criterion.unjudgeable or criterion.offline is None:
        message = f"criterion {criterion.verifier_id!r} cannot be judged offline: {criterion.unjudgeable}"
        raise GradingFailure("criterion_unjudgeable", message)
    finding = run_check(criterion.offline, answer, filesystem)
    rationale = finding.rationale
    earned = finding.holds != criterion.negated
    if criterion.negated:
        rationale += "; the criterion is negative, so it must not hold"
    if criterion.offline_negative is not None:
        forbidden = run_check(criterion.offline_negative, answer, filesystem)
        earned = earned and not forbidden.holds
        rationale += f"; forbidden: {forbidden.rationale}"
    return {
        "verifier_id": criterion.verifier_id,
        "criteria": criterion.criteria,
        "is_criteria_true": finding.holds,
        "score": 1.0 if earned else 0.0,
        "rationale": rationale,
        "judge": JUDGE,
        "negative": criterion.negated or criterion.offline_negative is not None,
        "is_primary_objective": criterion.is_primary_objective,
    }


def rewards_of(entries: List[Dict[str, Any]]) -> Dict[str, float]:  # noqa: UP006
    """Return the flat numbers of reward.json: `reward` (mean), `pass` (all met), one per criterion."""
    scores = [float(entry["score"]) for entry in entries]
    rewards = {"reward": math.fsum(scores) / len(scores), "pass": 1.0 if min(scores) >= 1.0 else 0.0}
    for entry, score in zip(entries, scores):  # noqa: B905  (strict= needs Python 3.10)
        rewards["criterion/" + entry["verifier_id"]] = score
    return rewards


def grade(trajectory: Any, verifiers: Any, filesystem: str) -> Tuple[Dict[str, float], Dict[str, Any]]:  # noqa: UP006
    """Return the contents of reward.json and grading.json. Raises `GradingFailure`."""
    criteria = parse_verifiers(verifiers)
    answer = final_answer(trajectory)
    entries = [judge_criterion(criterion, answer, filesystem) for criterion in criteria]
    rewards = rewards_of(entries)
    report = {
        "version": GRADING_VERSION,
        "judge": JUDGE,
        "reward": rewards["reward"],
        "pass": bool(rewards["pass"]),
        "criteria": entries,
        "final_answer": answer,
    }
    return rewards, report


# --- writing ---------------------------------------------------------------------------------------


def clear_outputs(out: str) -> None:
    """Make the output directory and remove earlier results from it. Raises `OSError`."""
    if os.path.islink(out):
        raise OSError(f"{out} is a symlink")
    os.makedirs(out, exist_ok=True)
    for name in OUTPUTS:
        path = os.path.join(out, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)


def write_json(out: str, name: str, value: Any) -> None:
    """Write a JSON file atomically. Raises `OSError`."""
    temporary = os.path.join(out, f".{name}.{os.getpid()}.part")
    # O_EXCL | O_NOFOLLOW: never through a file or link that someone left under this name.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    with os.fdopen(os.open(temporary, flags, 0o644), "w", encoding="utf-8", errors="backslashreplace") as stream:
        json.dump(value, stream, indent=1, ensure_ascii=False)
        stream.write("\n")
    os.replace(temporary, os.path.join(out, name))


def main(argv: Optional[List[str]] = None) -> int:  # noqa: UP006, UP045
    """Grade one trial; return 0 with reward.json written, 3 with grading_error.json written."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments == ["--search"]:
        return _search_child()
    parser = argparse.ArgumentParser(description="Grade a trial offline.")
    for option in ("--trajectory", "--verifiers", "--filesystem", "--out"):
        parser.add_argument(option, required=True)
    options = parser.parse_args(arguments)
    try:
        clear_outputs(options.out)
        verifiers = load_json(options.verifiers, "verifiers")
        trajectory = load_json(options.trajectory, "trajectory")
        rewards, report = grade(trajectory, verifiers, options.filesystem)
        write_json(options.out, "grading.json", report)
        write_json(options.out, "reward.json", rewards)
    except GradingFailure as failure:
        return _fail(options.out, failure.kind, failure.message)
    except Exception as error:
        return _fail(options.out, "internal", f"{type(error).__name__}: {error}")
    print(f"reward {rewards['reward']:.3f}")
    return 0


def _fail(out: str, kind: str, message: str) -> int:
    print(f"grading failed ({kind}): {message}", file=sys.stderr)
    try:
        clear_outputs(out)
        write_json(out, "grading_error.json", {"kind": kind, "message": message})
    except OSError as error:
        print(f"cannot write grading_error.json: {error}", file=sys.stderr)
    return 3


if __name__ == "__main__":
    sys.exit(main())
