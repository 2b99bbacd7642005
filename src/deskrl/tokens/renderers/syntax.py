"""Which tool-call syntax a template teaches: the one in which it writes a call itself."""

from __future__ import annotations

from deskrl.tokens.renderers import probe

# What must all show in a rendered call, the most telling first; the key is the parser's family.
_MARKS: dict[str, tuple[str, ...]] = {
    "harmony": ("<|call|>", f"to=functions.{probe.NAME}"),
    "deepseek_v3": ("<｜tool▁call▁begin｜>", f"<｜tool▁sep｜>{probe.NAME}", "```json"),
    "deepseek_v31": ("<｜tool▁call▁begin｜>", f"{probe.NAME}<｜tool▁sep｜>"),
    "glm": (f"<tool_call>{probe.NAME}", f"<arg_key>{probe.KEY}</arg_key>", "<arg_value>"),
    "qwen_xml": ("<tool_call>", f"<function={probe.NAME}>", f"<parameter={probe.KEY}>"),
    "hermes": ("<tool_call>", f'"name": "{probe.NAME}"', '"arguments":'),
    "llama3": (f'"name": "{probe.NAME}"', '"parameters":'),
}


def syntax_of(call: str) -> str | None:
    """The parser family of one rendered call."""
    return next((name for name, marks in _MARKS.items() if all(mark in call for mark in marks)), None)
