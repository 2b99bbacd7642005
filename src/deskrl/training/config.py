"""Configuration: SkyRL's dataclasses with one more block, `generator.desk`; presets are YAML plus `key=value`.

Invariant: an unknown key anywhere is an error that names the nearest known one. SkyRL resolves defaults by
itself afterwards; the resolved whole is written into the run's folder.
"""

# No postponed annotations here: SkyRL builds nested dataclasses from the annotations' real classes.
import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from skyrl.train.config import GeneratorConfig, SkyRLTrainConfig, make_config
from skyrl.train.config.config import BaseConfig
from yaml import YAMLError


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key and what to do."""


@dataclass
class DeskEngineConfig(BaseConfig):
    """Who serves the policy. `kind`: `skyrl` (SkyRL starts vLLM on GPUs), or on a CPU `embedded` or `vllm-cpu`."""

    kind: str = "skyrl"
    port: int = 0
    """Port of a CPU engine; 0 picks a free one."""
    threads: int = 2
    max_batch: int = 16
    record: bool = False
    """Embedded engine: write every sampled sequence to logs/engine-record.jsonl, to compare with what trains."""


@dataclass
class DeskConfig(BaseConfig):
    """What deskrl adds to SkyRL's configuration. Times in seconds, sizes in tokens."""

    run_dir: str = "runs/default"
    """Everything of the run lies here: config, trials, metrics, checkpoints."""
    model: str | None = None
    """`smollm2`, `tiny`, a model directory or a hub id; null: `trainer.policy.model.path` says."""
    tasks: list[str] = field(default_factory=list)
    """Task directories, or folders of them, to train on. `sample` stands for the built-in ones."""
    eval_tasks: list[str] = field(default_factory=list)
    worlds: str | None = None
    """Folder of worlds named by world id; null when the environment brings its own (images)."""
    environment: str = "deskrl.sandbox.bubblewrap:BubblewrapEnvironment"
    environment_kwargs: dict[str, Any] = field(default_factory=dict)
    engine: DeskEngineConfig = field(default_factory=DeskEngineConfig)
    max_context: int = 160_000
    max_turns: int = 100
    tools: list[str] | None = None
    """Tools the model sees; null: all of the world's."""
    optional_arguments: bool = True
    """Whether the model sees optional arguments of tools."""
    agent_timeout: float | None = None
    """Overrides the tasks' own agent timeout."""
    tool_timeout: float = 600.0
    model_timeout: float = 1800.0
    world_timeout: float = 900.0
    engine_retry: float = 60.0
    max_concurrent_trials: int = 64
    trial_starts_per_second: float = 3.0
    trial_retries: int = 1
    timeout_mask_instance_threshold: int = 2
    grade_truncated: bool = False
    """Grade trajectories cut by a length cap, instead of the recipe's reward 0."""
    agent_import_path: str = "deskrl.agent.harbor_agent:DeskAgent"


@dataclass
class DeskGeneratorConfig(GeneratorConfig):
    """SkyRL's generator configuration with the `desk` block."""

    desk: DeskConfig = field(default_factory=DeskConfig)


DeskTrainConfig: type[SkyRLTrainConfig] = make_config(generator_cls=DeskGeneratorConfig)


def resolve(preset: Path, overrides: Sequence[str] = ()) -> SkyRLTrainConfig:
    """A preset with `key=value` overrides, checked and built.

    Raises ConfigError for YAML that does not parse, an override without `=`, an unknown key, a wrong type.
    """
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"override {override!r} is not of the form key=value")
    try:
        merged = OmegaConf.merge(OmegaConf.load(preset), OmegaConf.from_dotlist(list(overrides)))
        data = OmegaConf.to_container(merged, resolve=True)
    except (OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
        raise ConfigError(f"{preset}: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{preset}: a preset is a mapping, found {type(data).__name__}")
    return build({str(key): value for key, value in data.items()}, str(preset))


def build(data: Mapping[str, Any], source: str = "config") -> SkyRLTrainConfig:
    """The configuration object for nested `data`. Raises ConfigError."""
    problems = list(_unknown(DeskTrainConfig, data, ""))
    if problems:
        raise ConfigError(f"{source}: " + "; ".join(problems))
    try:
        TypeAdapter(DeskTrainConfig).validate_python(dict(data))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{source}: {where}: {first['msg']}, got {first['input']!r}") from error
    try:
        return DeskTrainConfig.from_dict_config(OmegaConf.create(dict(data)))
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"{source}: {error}") from error


def as_yaml(config: SkyRLTrainConfig) -> str:
    """The resolved configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def _unknown(schema: Any, data: Mapping[str, Any], prefix: str) -> Iterator[str]:
    from skyrl.train.config.config import _resolve_class_type

    fields = {entry.name: entry for entry in dataclasses.fields(schema)}
    for key, value in data.items():
        where = f"{prefix}{key}"
        if key not in fields:
            close = difflib.get_close_matches(str(key), fields, n=1)
            yield f"unknown key {where}" + (f", did you mean {prefix}{close[0]}?" if close else "")
            continue
        nested = _resolve_class_type(fields[key].type)
        if isinstance(value, Mapping) and nested is not None and dataclasses.is_dataclass(nested):
            yield from _unknown(nested, value, f"{where}.")
