"""Models for renderer tests: SmolLM2's tokenizer with each family's control tokens, and each family's template.

The templates in `templates/` are written for these tests. They keep what the published ones do around turns
(framing, trimming, JSON, dropped reasoning, missing ends) and leave out images, options and the wording of prompts.
Directories of real models join in through DESKRL_TEST_RENDER_MODELS (separated by colons), whatever their family.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deskrl.agent.model_files import load_chat_tokenizer
from deskrl.tokens import ChatTokenizer

TEMPLATES = Path(__file__).parent / "templates"
REAL = [path for path in os.environ.get("DESKRL_TEST_RENDER_MODELS", "").split(":") if path]


@dataclass(frozen=True)
class Vocabulary:
    """Control tokens that a family adds: special ones and those that are not; and its named tokens."""

    special: tuple[str, ...]
    plain: tuple[str, ...] = ()
    eos: str = "<|endoftext|>"
    bos: str = ""


_QWEN = Vocabulary(
    ("<|im_start|>", "<|im_end|>"),
    ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    "<|im_end|>",
)
_GLM = Vocabulary(
    ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    (*_QWEN.plain, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
_LLAMA = Vocabulary(
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    (),
    "<|eot_id|>",
    "<|begin_of_text|>",
)
_TOOLS = ("calls", "call", "outputs", "output")
_DEEPSEEK = Vocabulary(
    ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    (
        "<｜User｜>",
        "<｜Assistant｜>",
        "<think>",
        "</think>",
        "<｜tool▁sep｜>",
        *(f"<｜tool▁{part}▁{edge}｜>" for part in _TOOLS for edge in ("begin", "end")),
    ),
    "<｜end▁of▁sentence｜>",
    "<｜begin▁of▁sentence｜>",
)
_HARMONY = Vocabulary(
    ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"),
    (),
    "<|return|>",
)

# How the tokenizers of these families cut text. SmolLM2's own way cuts the newlines that end a prompt differently
# when text follows, so that a full render of a Llama conversation would disagree with its own prompt.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)

VOCABULARIES = {
    "qwen3": _QWEN,
    "qwen35": _QWEN,
    "glm46": _GLM,
    "glm47": _GLM,
    "llama31": _LLAMA,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "harmony": _HARMONY,
}


def definition(tiny: Path, vocabulary: Vocabulary) -> str:
    """SmolLM2's tokenizer with a family's control tokens."""
    described: dict[str, Any] = json.loads((tiny / "tokenizer.json").read_text())
    added = [token for token in described["added_tokens"] if token["content"] == "<|endoftext|>"]
    number = 60_000
    for names, special in ((vocabulary.special, True), (vocabulary.plain, False)):
        for name in names:
            known = described["model"]["vocab"].get(name)
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added.append({"id": number if known is None else known, "content": name, "special": special, **flags})
            number += 1
    described["added_tokens"] = added
    split = {"type": "Split", "pattern": {"Regex": _SPLIT}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    described["decoder"] = byte_level  # SmolLM2's would turn the bars in DeepSeek's control tokens into spaces
    return json.dumps(described)


def model(tiny: Path, name: str, template: str | None = None) -> ChatTokenizer:
    """A family's tokenizer with its template, or with another one."""
    vocabulary = VOCABULARIES[name]
    text = template if template is not None else (TEMPLATES / f"{name}.jinja").read_text()
    tokens = {"eos_token": vocabulary.eos, **({"bos_token": vocabulary.bos} if vocabulary.bos else {})}
    return ChatTokenizer(definition(tiny, vocabulary), text, tokens)


def any_model(tiny: Path, name: str) -> ChatTokenizer:
    """`smollm2`, a family of this module, or a directory."""
    if name == "smollm2":
        return load_chat_tokenizer(str(tiny))
    return model(tiny, name) if name in VOCABULARIES else load_chat_tokenizer(name)
