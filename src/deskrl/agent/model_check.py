"""Checks a model directory before a run: its files, then how its template, tokenizer and parser fit together."""

from __future__ import annotations

from pathlib import Path

from deskrl.agent.model_files import ModelFilesError, load_chat_tokenizer
from deskrl.tokens.check import Finding, check_model


def check_model_dir(model_dir: str | Path, parser_family: str | None = None) -> list[Finding]:
    """What was found; the model can be used with that parser (None: its own) if every finding is ok."""
    try:
        tokenizer = load_chat_tokenizer(str(model_dir))
    except (ModelFilesError, ValueError) as error:
        return [Finding("model files", False, str(error), "give a directory with tokenizer.json and a chat template")]
    return [Finding("model files", True, str(model_dir)), *check_model(tokenizer, parser_family)]
