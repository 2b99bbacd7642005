"""Tool definitions for templates that have none, in the system turn.

The wording is Qwen's. A template that writes calls without defining tools (DeepSeek's) gets its own call as the
example; one that knows neither gets the Hermes form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from deskrl.tokens.chat import Message
from deskrl.tokens.renderers.probe import KEY, NAME, VALUE

# Qwen's wording (Qwen2.5 chat template), for templates that cannot render tools themselves.
TOOL_PREAMBLE = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_EXAMPLE = "\n</tools>\n\nFor each function call, write the function name and the arguments in this form:\n"
TOOL_POSTAMBLE = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


def with_tool_preamble(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], call: str = ""
) -> list[Message]:
    """Messages whose system turn (a new one if there is none) ends with the tools; `call`: a probe's call."""
    definitions = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = TOOL_PREAMBLE + definitions + (_EXAMPLE + _readable(call) if call else TOOL_POSTAMBLE)
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": messages[0]["content"] + text}, *messages[1:]]
    return [{"role": "system", "content": text.lstrip("\n")}, *messages]


def _readable(call: str) -> str:
    for tag, said in ((NAME, "function-name"), (KEY, "argument-name"), (VALUE, "argument-value")):
        call = call.replace(tag, said)
    return call
