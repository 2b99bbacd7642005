"""The start-up check: a model, its template and a parser fit, or the reason is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from render_models import VOCABULARIES, definition, model
from typer.testing import CliRunner

from deskrl.agent.model_check import check_model_dir
from deskrl.cli import app
from deskrl.tokens import ChatTokenizer
from deskrl.tokens.check import check_model

_SYNTAX = {
    "smollm2": "hermes",
    "qwen3": "hermes",
    "qwen35": "qwen_xml",
    "glm46": "glm",
    "glm47": "glm",
    "llama31": "llama3",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v31",
    "harmony": "harmony",
}


@pytest.mark.parametrize("name", _SYNTAX)
def test_each_family_fits_its_own_parser(load: Callable[[str], ChatTokenizer], name: str) -> None:
    for parser in (None, _SYNTAX[name]):
        found = check_model(load(name), parser)
        assert [finding for finding in found if not finding.ok] == []
        assert found[-1].name == f"parser {_SYNTAX[name]}"


@pytest.mark.parametrize("name", [name for name in _SYNTAX if name not in ("smollm2", "qwen3")])
def test_case_15_a_model_with_another_familys_parser_is_refused(
    load: Callable[[str], ChatTokenizer], name: str
) -> None:
    failed = {finding.name: finding for finding in check_model(load(name), "hermes") if not finding.ok}
    assert f"teaches {_SYNTAX[name]}, the parser reads hermes" in failed["call syntax"].detail
    assert failed["call syntax"].fix == f"use the parser {_SYNTAX[name]}"
    # And the Hermes parser was really tried on the call.
    assert "cannot read" in failed["parser hermes"].detail


def test_an_unknown_parser_is_named(load: Callable[[str], ChatTokenizer]) -> None:
    failed = [finding for finding in check_model(load("qwen3"), "qwen4") if not finding.ok]
    assert any("there is no such parser" in finding.detail for finding in failed)


def test_a_template_of_another_vocabulary_is_refused(tiny: Path) -> None:
    template = (
        "{% for m in messages %}{{ '<|turn|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{{ '<|turn|>assistant\\n' }}"
    )
    (found,) = check_model(model(tiny, "qwen3", template))
    assert not found.ok and "<|turn|>" in found.detail and "plain text" in found.detail


def _directory(folder: Path, tiny: Path, name: str, template: str) -> Path:
    (folder / "tokenizer.json").write_text(definition(tiny, VOCABULARIES[name]))
    config = {"eos_token": VOCABULARIES[name].eos, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_doctor_tokens_checks_a_directory(load: Callable[[str], ChatTokenizer], tiny: Path, tmp_path: Path) -> None:
    folder = _directory(tmp_path, tiny, "qwen35", load("qwen35").chat_template)
    run = CliRunner(env={"COLUMNS": "300"})
    fits = run.invoke(app, ["doctor", "tokens", str(folder)])
    assert fits.exit_code == 0 and "qwen_xml" in fits.output
    refused = run.invoke(app, ["doctor", "tokens", str(folder), "--parser", "hermes"])
    assert refused.exit_code == 2 and "use the parser qwen_xml" in refused.output
    small = run.invoke(app, ["doctor", "tokens", "tiny"])
    assert small.exit_code == 0 and "hermes" in small.output


def test_a_directory_without_its_files_is_refused(tmp_path: Path) -> None:
    (found,) = check_model_dir(tmp_path)
    assert not found.ok and "tokenizer.json" in found.detail
    run = CliRunner(env={"COLUMNS": "300"})
    assert run.invoke(app, ["doctor", "tokens", str(tmp_path)]).exit_code == 2
    assert run.invoke(app, ["doctor", "tokens", "no/such model"]).exit_code == 2
