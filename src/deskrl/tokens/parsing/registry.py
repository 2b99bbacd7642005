"""The parser of each family, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from deskrl.tokens.parsing.deepseek import DeepSeekParser
from deskrl.tokens.parsing.glm import GlmParser
from deskrl.tokens.parsing.harmony import HarmonyParser
from deskrl.tokens.parsing.hermes import HermesParser
from deskrl.tokens.parsing.llama import LlamaParser
from deskrl.tokens.parsing.outcome import ParsedTurn
from deskrl.tokens.parsing.qwen_xml import QwenXmlParser
from deskrl.tokens.parsing.schema import JsonSchema


class Parser(Protocol):
    """Reads the turns of one family."""

    def parse(self, text: str, tools: Mapping[str, JsonSchema], truncated: bool = False) -> ParsedTurn:
        """Reads one turn, never raises.

        Args:
            text: what the model wrote, special tokens kept, without the prompt.
            tools: JSON schema of each tool's parameters, by the tool's name.
            truncated: the token cap ended the turn, not the model.
        """


# Each makes a parser from whether the prompt ends in an open `<think>`; harmony has no such thing.
FAMILIES: Mapping[str, Callable[[bool], Parser]] = MappingProxyType(
    {
        "hermes": HermesParser,
        "qwen_xml": QwenXmlParser,
        "glm": GlmParser,
        "llama3": LlamaParser,
        "deepseek_v3": lambda prefilled: DeepSeekParser(prefilled, fenced=True),
        "deepseek_v31": lambda prefilled: DeepSeekParser(prefilled, fenced=False),
        "harmony": lambda prefilled: HarmonyParser(),
    }
)


def parser_for(family: str, *, prefilled_thought: bool = False) -> Parser:
    """The parser of a family; `prefilled_thought`: the prompt already ends in an open `<think>`.

    Raises:
        ValueError: no such family.
    """
    if family not in FAMILIES:
        raise ValueError(f"no tool-call parser for family {family!r}; there are {', '.join(FAMILIES)}")
    return FAMILIES[family](prefilled_thought)
