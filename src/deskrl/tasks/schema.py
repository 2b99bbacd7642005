"""The files of a task as models: archipelago.json, verifiers.json, golden_responses.json; the loaded task.

Model: task.toml is harbor's own `TaskConfig`, imported where needed; the rest is described here. All
models are frozen.

Invariants
- Models ignore keys they do not know; `problems.unknown_keys` reports them, with a suggestion.
- An `offline` check has the same shape as in the stand-alone grader, which may import nothing and so
  states it again; a test holds the two together.
- A golden response is never part of `Task`: nothing that trains or grades may see it by accident.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, field_validator

_Number = Annotated[StrictInt | StrictFloat, Field(allow_inf_nan=False)]
Bucket = Literal["ib", "law", "consulting", "other"]

_BUCKETS: tuple[tuple[str, Bucket], ...] = (
    ("investment-banking-", "ib"),
    ("law-", "law"),
    ("management-consulting-", "consulting"),
)


def bucket_of(world_short_name: str) -> Bucket:
    """Return the evaluation bucket that the prefix of a world's short name stands for."""
    for prefix, bucket in _BUCKETS:
        if world_short_name.startswith(prefix):
            return bucket
    return "other"


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)


class Archipelago(_Document):
    """archipelago.json: which world the task plays in and what it needs."""

    task_id: str = Field(min_length=1)
    task_name: str = Field(min_length=1)
    task_slug: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    world_id: str = Field(min_length=1)
    world_short_name: str = Field(min_length=1)
    ecr_image: str
    required_env_keys: list[str]
    needs_snapshot: bool


class _Check(BaseModel):
    # A check with a key that its kind does not know would be judged by less than its author wrote.
    model_config = ConfigDict(frozen=True, extra="forbid")


class ContainsCheck(_Check):
    """The final answer contains `text`."""

    kind: Literal["contains"]
    text: StrictStr = Field(min_length=1)
    case_sensitive: StrictBool = False


class RegexCheck(_Check):
    """The final answer matches `pattern` somewhere."""

    kind: Literal["regex"]
    pattern: StrictStr = Field(min_length=1)

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"is not a regular expression: {error}") from None
        return pattern


class NumberCheck(_Check):
    """The final answer has a number within `tolerance` (absolute) of `value`."""

    kind: Literal["number"]
    value: _Number
    tolerance: _Number = Field(default=0, ge=0)


class FileExistsCheck(_Check):
    """There is a regular file at `path` (under /filesystem) of at least `min_bytes` bytes."""

    kind: Literal["file_exists"]
    path: StrictStr = Field(min_length=1)
    min_bytes: _Number = Field(default=0, ge=0)

    @field_validator("path")
    @classmethod
    def _stays_inside(cls, path: str) -> str:
        if ".." in path.split("/"):
            raise ValueError("must not contain '..'")
        return path


OfflineCheck = Annotated[ContainsCheck | RegexCheck | NumberCheck | FileExistsCheck, Field(discriminator="kind")]


class VerifierValues(_Document):
    """The judged content of a criterion. `offline` and `offline_negative` are deskrl's own additions."""

    criteria: str = Field(min_length=1)
    is_primary_objective: bool = False
    expected_file_type: str | None = None
    expected_output_files: list[str] | str | None = None
    artifacts_to_reference: list[Any] | str | None = None
    negative_criteria: bool | str | list[str] | None = None
    offline: OfflineCheck | None = None
    offline_negative: OfflineCheck | None = None


class Verifier(_Document):
    """One criterion of verifiers.json."""

    verifier_id: str = Field(min_length=1)
    verifier_version: int
    world_id: str | None
    task_id: str
    eval_config_id: str
    verifier_values: VerifierValues
    verifier_index: int = Field(ge=0)
    verifier_dependencies: list[str] | None


class GoldenResponse(BaseModel):
    """One entry of golden_responses.json; sources differ in what else they store beside the text."""

    model_config = ConfigDict(frozen=True, extra="allow")

    gold_response: str | None = None
    gold_response_type: str | None = None


@dataclass(frozen=True)
class Timeouts:
    """Limits of a trial in seconds; `agent` is None when task.toml sets none."""

    agent: float | None
    verifier: float


@dataclass(frozen=True)
class Task:
    """A task that was checked and loaded. `path` is its directory."""

    path: Path
    task_id: str
    name: str
    slug: str
    world_id: str
    world_short_name: str
    bucket: Bucket
    ecr_image: str
    required_env_keys: tuple[str, ...]
    needs_snapshot: bool
    instruction: str
    verifiers: tuple[Verifier, ...]
    timeouts: Timeouts
    hints: tuple[str, ...] = ()

    @property
    def offline_gradable(self) -> bool:
        """Whether every criterion has a deterministic check, so that no LLM judge is needed."""
        return all(verifier.verifier_values.offline is not None for verifier in self.verifiers)
