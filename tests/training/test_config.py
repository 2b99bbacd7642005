"""Presets resolve against SkyRL's own dataclasses and checks; a wrong key is found and named."""

from __future__ import annotations

from pathlib import Path

import pytest

from deskrl.training.config import ConfigError, as_yaml, build, resolve
from deskrl.training.presets import PRESETS, PresetError, preset_path

ALL = sorted(PRESETS.rglob("*.yaml"))


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_every_preset_resolves_and_passes_skyrls_checks(path: Path) -> None:
    from skyrl.train.utils import validate_cfg

    config = resolve(path)
    config.generator.inference_engine.external_proxy_url = "http://127.0.0.1:1"
    config.generator.inference_engine.external_server_urls = ["http://127.0.0.1:1"]
    validate_cfg(config)


def test_the_resolved_configuration_can_be_read_back(tmp_path: Path) -> None:
    config = resolve(preset_path("smoke-cpu"), ["trainer.seed=7", "generator.desk.max_turns=2"])
    (tmp_path / "config.yaml").write_text(as_yaml(config))
    again = resolve(tmp_path / "config.yaml")
    assert again == config
    assert again.trainer.seed == 7 and again.generator.desk.max_turns == 2


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.sed=1", ["trainer.sed", "trainer.seed"]),
        ("generator.desk.max_turnz=3", ["generator.desk.max_turnz", "generator.desk.max_turns"]),
        ("generator.desk.engine.prot=1", ["generator.desk.engine.prot", "generator.desk.engine.port"]),
        ("trainer.algorithm.policy_loss_typ=dppo", ["policy_loss_typ", "trainer.algorithm.policy_loss_type"]),
        ("generator.desk.max_turns=many", ["generator.desk.max_turns", "integer", "many"]),
        ("trainer.policy.optimizer_config.lr=fast", ["trainer.policy.optimizer_config.lr", "number"]),
        ("justakey", ["justakey", "key=value"]),
    ],
)
def test_a_wrong_override_names_the_key_and_what_to_do(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(preset_path("smoke-cpu"), [override])
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_yaml_that_does_not_parse_or_is_no_mapping(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    for text in ("trainer: [1, 2", "- a\n- b\n", "a: ${nowhere}\n"):
        bad.write_text(text)
        with pytest.raises(ConfigError, match=r"bad\.yaml"):
            resolve(bad)


def test_several_unknown_keys_are_reported_together() -> None:
    with pytest.raises(ConfigError) as error:
        build({"trainer": {"sed": 1}, "genrator": {}})
    assert "trainer.sed" in str(error.value) and "genrator" in str(error.value)


def test_unknown_presets() -> None:
    with pytest.raises(PresetError, match="did you mean 'smoke-cpu'"):
        preset_path("smoke-cpus")
    with pytest.raises(PresetError, match="no such preset file"):
        preset_path("nowhere.yaml")
