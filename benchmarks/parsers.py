"""How a parser's time grows with the text: each family on hostile and on valid turns of 250 KB and 1 MB.

Prints one JSON line per input: seconds at both sizes, and their ratio. Linear time is a ratio of 4; quadratic is 16.

    python benchmarks/parsers.py
"""

from __future__ import annotations

import json
import time

from deskrl.tokens.parsing import Parser, parser_for

SMALL, LARGE = 250_000, 1_000_000
REPEATS = 5
DEEPSEEK = "<｜tool▁calls▁begin｜>"

# family, what stands before, the piece that is repeated, what stands after
INPUTS = [
    ("hermes", "", "<tool_call>", ""),
    ("hermes", "<tool_call>", '{"name":', ""),
    ("hermes", "", "<think>", ""),
    ("hermes", "", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n', ""),
    ("qwen_xml", "", "<tool_call>", ""),
    ("qwen_xml", "<tool_call><function=f>", "<parameter=", "</function></tool_call>"),
    ("qwen_xml", "<tool_call><function=f><parameter=a>", "</parameter", "</parameter></function></tool_call>"),
    ("qwen_xml", "", "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>\n", ""),
    ("glm", "<tool_call>f", "<arg_key>", "</tool_call>"),
    ("glm", "<tool_call>f<arg_key>a</arg_key>", "<arg_value>", "</arg_value></tool_call>"),
    ("glm", "", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>\n", ""),
    ("llama3", "", "{", ""),
    ("llama3", "<|python_tag|>", '{"name":', ""),
    ("llama3", "", '{"name": "f", "parameters": {"a": 1}}; ', ""),
    ("deepseek_v3", "", DEEPSEEK, ""),
    ("deepseek_v3", DEEPSEEK, "<｜tool▁call▁begin｜>", ""),
    (
        "deepseek_v3",
        DEEPSEEK,
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>\n",
        "<｜tool▁calls▁end｜>",
    ),
    ("deepseek_v31", DEEPSEEK, "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ("harmony", "", "<|channel|>", ""),
    ("harmony", "", "<|start|>assistant<|channel|>analysis<|message|>a<|end|>", ""),
    ("harmony", "", "<|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>", ""),
]


def seconds(parser: Parser, text: str) -> float:
    """The best of several runs: the one least disturbed by the machine."""
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        parser.parse(text, {})
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    for family, before, piece, after in INPUTS:
        parser = parser_for(family)
        small, large = (seconds(parser, before + piece * (size // len(piece)) + after) for size in (SMALL, LARGE))
        record = {"family": family, "before": before, "piece": piece, "after": after}
        record |= {"seconds_250kb": round(small, 6), "seconds_1mb": round(large, 6), "ratio": round(large / small, 2)}
        print(json.dumps(record, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
