"""The run folder: names of what lies in it, and making one. Imports nothing of weight."""

from pathlib import Path

CONFIG_FILE = "config.yaml"
ERROR_FILE = "error.json"
LOG_FILE = "logs/train.log"
CHECKPOINTS = "checkpoints"


class RunFolderError(RuntimeError):
    """The run folder cannot be written; the message says where, why and what to do."""


def make_run_folder(run_dir: Path) -> None:
    """Make the folder with its logs, and prove that data can be written there.

    Raises RunFolderError: no permission, a read-only or full disk, a file in the way.
    """
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        probe = run_dir / ".write-test"
        probe.write_bytes(b"x" * 65536)
        probe.unlink()
    except OSError as error:
        raise RunFolderError(
            f"the run folder {run_dir} cannot be written ({error.strerror}): choose another generator.desk.run_dir"
        ) from error
