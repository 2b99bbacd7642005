"""What is prepared and refused before a run starts anything expensive."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from deskrl.training.config import resolve
from deskrl.training.files import RunFolderError
from deskrl.training.preflight import PreflightError, prepare
from deskrl.training.presets import preset_path


def smoke(tmp_path: Path, *overrides: str) -> Any:
    defaults = [f"generator.desk.run_dir={tmp_path / 'run'}", "generator.desk.model=tiny"]
    return resolve(preset_path("smoke-cpu"), [*defaults, *overrides])


def test_a_run_keeps_to_its_own_folder(tmp_path: Path, tiny_model: Path) -> None:
    config = smoke(tmp_path)
    tasks, eval_tasks = prepare(config)
    assert len(tasks) == len(eval_tasks) == 12
    assert config.trainer.policy.model.path == config.trainer.ref.model.path == str(tiny_model)
    for path in (config.trainer.ckpt_path, config.trainer.export_path, config.trainer.log_path):
        assert Path(path).is_relative_to(tmp_path / "run")
    assert (Path(config.generator.desk.worlds) / tasks[0].world_id).is_dir()
    prepare(config)  # a resolved configuration can be prepared again


def test_skyrls_own_key_for_the_model_is_honoured(tmp_path: Path, tiny_model: Path) -> None:
    config = smoke(tmp_path, "generator.desk.model=null", f"trainer.policy.model.path={tiny_model}")
    prepare(config)
    assert config.trainer.policy.model.path == str(tiny_model)


def test_two_different_models_are_refused_and_none_is_taken_silently(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="two models"):
        prepare(smoke(tmp_path, "trainer.policy.model.path=some/other"))


def test_a_preset_for_gpus_is_refused_without_one(tmp_path: Path) -> None:
    from deskrl.training.cpu.shim import has_gpu

    if has_gpu():
        pytest.skip("this machine has a GPU")
    with pytest.raises(PreflightError, match="needs an NVIDIA GPU"):
        prepare(smoke(tmp_path, "generator.desk.engine.kind=skyrl"))
    with pytest.raises(PreflightError, match="use skyrl, embedded or vllm-cpu"):
        prepare(smoke(tmp_path, "generator.desk.engine.kind=vllm"))


def test_a_file_in_the_way_of_the_run_folder(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(RunFolderError, match="cannot be written"):
        prepare(smoke(tmp_path))


def test_a_model_whose_template_forgets_is_refused_before_the_run(tmp_path: Path, tiny_model: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / "chat_template.jinja").write_text("{{ messages[-1]['content'] }}")
    with pytest.raises(PreflightError, match="cannot be trained token by token"):
        prepare(smoke(tmp_path, f"generator.desk.model={model}"))
