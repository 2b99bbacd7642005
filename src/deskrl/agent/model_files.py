"""Reads a model directory's tokenizer and chat template, and finds their renderer, once per process."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from deskrl.tokens import ChatTokenizer
from deskrl.tokens.renderers import TurnRenderer, renderer_for


class ModelFilesError(ValueError):
    """A model directory without what the agent needs; the message names the file."""


@functools.lru_cache(maxsize=8)
def load_chat_tokenizer(model_dir: str) -> ChatTokenizer:
    """The tokenizer and chat template of a local model directory, shared by all trials of the process.

    Raises:
        ModelFilesError: `tokenizer.json` or a chat template is missing or unreadable.
    """
    folder = Path(model_dir)
    definition = _read(folder / "tokenizer.json")
    config = json.loads(_read(folder / "tokenizer_config.json"))
    template_file = folder / "chat_template.jinja"
    template = template_file.read_text() if template_file.exists() else config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("tool_use") or named.get("default")
    if not isinstance(template, str):
        raise ModelFilesError(f"{folder}: no chat_template.jinja and no chat_template in tokenizer_config.json")
    return ChatTokenizer(definition, template, _special_tokens(config))


@functools.lru_cache(maxsize=8)
def load_renderer(model_dir: str) -> TurnRenderer:
    """The turn renderer that fits a local model directory, proved once and shared by all trials of the process.

    Raises:
        ModelFilesError: see `load_chat_tokenizer`.
        RendererError: no renderer reproduces the model's template; the message says where they part.
    """
    return renderer_for(load_chat_tokenizer(model_dir))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ModelFilesError(f"{path}: {error.strerror}; a model directory needs a fast tokenizer") from error


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens
