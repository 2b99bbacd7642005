"""The training process: `python -m deskrl.training.main PRESET [key=value ...]`.

It resolves the configuration, checks what the run needs before anything expensive starts, then runs the
experiment. `deskrl train` and `deskrl smoke` start it as a child and watch its run folder; it also works
alone. What a person has to mend ends in exit code 2 with one message, which also goes to `error.json`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from deskrl.training.files import CONFIG_FILE, ERROR_FILE, RunFolderError

if TYPE_CHECKING:
    from skyrl.train.config import SkyRLTrainConfig

    from deskrl.training.cpu.launch import EngineProcess

USER_ERROR = 2


def main(argv: list[str] | None = None) -> int:
    """Run one experiment; returns the exit code (0, 1 for a crash, 2 for something to mend, 130 on Ctrl-C)."""
    parser = argparse.ArgumentParser(prog="deskrl.training.main")
    parser.add_argument("preset", help="a preset's name, or a YAML file")
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--evaluate", action="store_true", help="evaluate the starting weights; train nothing")
    parser.add_argument("--dry-run", action="store_true", help="resolve and check everything, then stop")
    options = parser.parse_args(argv)
    _end_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    run_dir: list[Path] = []
    try:
        _run(options, run_dir)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        known = _is_users(error)
        if not known:
            traceback.print_exc()
        message = _message(error)
        print(f"error: {message}", file=sys.stderr)
        if run_dir:
            record = {"message": message, "type": type(error).__name__, "exit_code": USER_ERROR if known else 1}
            with suppress(OSError):  # said on stderr already, which is all that is left on a full disk
                (run_dir[0] / ERROR_FILE).write_text(json.dumps(record))
        return USER_ERROR if known else 1
    return 0


def _run(options: argparse.Namespace, run_dir: list[Path]) -> None:
    from deskrl.training.config import as_yaml, resolve
    from deskrl.training.presets import preset_path

    config = resolve(preset_path(options.preset), options.overrides)
    desk = config.generator.desk
    run_dir.append(Path(desk.run_dir).absolute())
    from deskrl.training.preflight import prepare

    tasks, eval_tasks = prepare(config, evaluate=options.evaluate)
    (run_dir[0] / CONFIG_FILE).write_text(as_yaml(config), encoding="utf-8")
    if options.dry_run:
        return
    from deskrl.trials.progress import Progress

    for chatty in ("httpx", "mcp", "harbor"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    progress = Progress(run_dir[0])
    progress.note(phase="starting engine and SkyRL")
    # The engine loads while this process imports SkyRL and starts Ray.
    with _engine(config) as engine:
        from deskrl.training.cpu import shim
        from deskrl.training.experiments import DeskExperiment, EvalExperiment
        from deskrl.training.ray_session import ray_session

        _validate(config)
        with ray_session(config):
            url = None
            if engine is not None:
                shim.install(cpu=True)
                engine.wait_ready()
                url = engine.base_url
            elif config.trainer.strategy == "fsdp":
                from deskrl.training import tied

                tied.install()
            kind = EvalExperiment if options.evaluate else DeskExperiment
            experiment = kind(config, tasks, eval_tasks, progress, url)
            progress.note(phase="evaluating" if options.evaluate else "training")
            experiment.run()
    progress.note(phase="done")


@contextmanager
def _engine(config: SkyRLTrainConfig) -> Iterator[EngineProcess | None]:
    """A CPU engine that is starting, or None where SkyRL serves the policy itself."""
    desk = config.generator.desk
    if desk.engine.kind == "skyrl":
        yield None
        return
    from deskrl.training.cpu.launch import EngineProcess

    # A CPU engine gets its weights from CPU workers: a GPU of this machine is hidden from all of the run's
    # processes. (An empty value would do that too, but Ray cannot read one.)
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    engine = EngineProcess(
        desk.engine.kind,
        config.trainer.policy.model.path,
        config.generator.inference_engine.served_model_name,
        log_path=Path(desk.run_dir).absolute() / "logs" / "engine.log",
        port=desk.engine.port,
        max_model_len=desk.max_context,
        max_batch=desk.engine.max_batch,
        threads=desk.engine.threads,
        seed=config.trainer.seed,
        record=Path(desk.run_dir).absolute() / "logs" / "engine-record.jsonl" if desk.engine.record else None,
    )
    try:
        engine.spawn()
        config.generator.inference_engine.external_proxy_url = engine.base_url
        config.generator.inference_engine.external_server_urls = [engine.base_url]
        yield engine
    finally:
        engine.stop()


def _validate(config: SkyRLTrainConfig) -> None:
    """SkyRL's own checks, once the engine's address is known. Raises ConfigError."""
    from skyrl.train.utils import validate_cfg

    from deskrl.training.config import ConfigError

    try:
        validate_cfg(config)
    except (ValueError, AssertionError, NotImplementedError) as error:
        raise ConfigError(str(error)) from error


def _is_users(error: BaseException) -> bool:
    """Whether someone has to mend a file, an option or the machine, rather than this program."""
    from deskrl.sandbox.errors import SandboxUnavailable
    from deskrl.tasks.problems import TaskFormatError
    from deskrl.training.config import ConfigError
    from deskrl.training.cpu.launch import EngineError
    from deskrl.training.dataset import TaskSetError
    from deskrl.training.models import ModelError
    from deskrl.training.preflight import PreflightError
    from deskrl.training.presets import PresetError
    from deskrl.training.trainers import TrialsFailedError

    mendable = (
        ConfigError,
        EngineError,
        ModelError,
        PreflightError,
        PresetError,
        RunFolderError,
        SandboxUnavailable,
        TaskFormatError,
        TaskSetError,
        TrialsFailedError,
        OSError,
    )
    return isinstance(error, mendable)


def _message(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _end_with_parent() -> None:
    """SIGTERM for this process when the one that watches it dies (Linux)."""
    if os.environ.get("DESKRL_SUPERVISED"):
        import ctypes

        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))


if __name__ == "__main__":
    sys.exit(main())
