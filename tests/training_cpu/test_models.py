"""Model names become complete folders, once; a build that dies leaves nothing that looks like one."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deskrl.training import models
from deskrl.training.models import ModelError, prepare_model


def test_tiny_is_complete_and_not_built_again(tiny: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (
        "<|im_end|>",
        "<|im_end|>",
        "<|im_start|>",
    )
    model = AutoModelForCausalLM.from_pretrained(tiny)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id == end
    assert model.config.pad_token_id == end
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.tie_word_embeddings
    assert sum(p.numel() for p in model.parameters()) < 8e6
    inode = tiny.stat().st_ino
    assert prepare_model("tiny") == tiny
    assert tiny.stat().st_ino == inode


def test_smollm2_stops_and_knows_france() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = prepare_model("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    out = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist()
    assert "Paris" in tokenizer.decode(out)
    assert out[-1] == tokenizer.eos_token_id, "the answer does not end by itself"


def _fake_build(out: Path) -> None:
    (out / "config.json").write_text("{}")


def test_a_build_that_is_killed_leaves_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from deskrl.training import models\n"
        "def build(out):\n"
        "    (out / 'config.json').write_text('{}'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "models._BUILDERS['tiny'] = build; models.prepare_model('tiny', Path(sys.argv[1]))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == -9
    assert not (tmp_path / "tiny").exists()
    assert list(tmp_path.glob(".tiny.build-*")), "the kill came before the build"
    monkeypatch.setitem(models._BUILDERS, "tiny", _fake_build)
    assert (prepare_model("tiny", tmp_path) / "config.json").is_file()
    assert not list(tmp_path.glob(".tiny.build-*"))


def test_a_failed_or_outdated_entry_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(out: Path) -> None:
        _fake_build(out)
        raise OSError("disk full")

    monkeypatch.setitem(models._BUILDERS, "tiny", fail)
    with pytest.raises(OSError, match="disk full"):
        prepare_model("tiny", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [".tiny.lock"]
    monkeypatch.setitem(models._BUILDERS, "tiny", _fake_build)
    folder = prepare_model("tiny", tmp_path)
    (folder / "stale").touch()
    monkeypatch.setattr(models, "FORMAT", "of the future")
    assert not (prepare_model("tiny", tmp_path) / "stale").exists()


def test_many_callers_build_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = []

    def build(out: Path) -> None:
        builds.append(out)
        time.sleep(0.2)
        _fake_build(out)

    monkeypatch.setitem(models._BUILDERS, "tiny", build)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: prepare_model("tiny", tmp_path), range(4))) == {tmp_path / "tiny"}
    assert len(builds) == 1


def test_other_names(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="has no config"):
        prepare_model(str(tmp_path / "empty"))
    with pytest.raises(ModelError, match="no model directory"):
        prepare_model(str(tmp_path / "absent"))
    with pytest.raises(ModelError, match="did you mean 'smollm2'"):
        prepare_model("smolm2")
    _fake_build(tmp_path)
    assert prepare_model(str(tmp_path)) == tmp_path
    assert prepare_model("Qwen/Qwen3-0.6B") == Path("Qwen/Qwen3-0.6B")
    assert os.fspath(models.default_cache_dir()).endswith("models")
