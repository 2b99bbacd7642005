"""DeepSeek tool calls between special tokens. V3 and R1 fence the arguments, V3.1 does not:

    V3:   BEGIN_ALL BEGIN function SEP NAME "\\n```json\\n" ARGUMENTS "\\n```" END ... END_ALL
    V3.1: BEGIN_ALL BEGIN NAME SEP ARGUMENTS END ... END_ALL

Decode with special tokens kept, or the calls are lost. The JSON carries its own types. The closing END_ALL may be
missing at the end of a turn that was not cut, as some servers stop there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deskrl.tokens.parsing.blocks import cut_opening, skip_space
from deskrl.tokens.parsing.jsonvalue import load_arguments, load_json
from deskrl.tokens.parsing.outcome import Malformed, ParsedTurn, Problem, ToolCall, Truncated, turn
from deskrl.tokens.parsing.reasoning import split_reasoning, unclosed_thought
from deskrl.tokens.parsing.schema import JsonSchema
from deskrl.tokens.parsing.stops import end_of_turn

BEGIN_ALL = "<｜tool▁calls▁begin｜>"
END_ALL = "<｜tool▁calls▁end｜>"
BEGIN = "<｜tool▁call▁begin｜>"
SEP = "<｜tool▁sep｜>"
END = "<｜tool▁call▁end｜>"
_FENCE = "\n```json\n"
_FENCE_CLOSE = "\n```"
_STOPS = ("<｜end▁of▁sentence｜>",)


@dataclass(frozen=True)
class DeepSeekParser:
    """Reads DeepSeek turns; `fenced`: V3 and R1, else V3.1; `prefilled_thought`: the prompt ends in `<think>`."""

    prefilled_thought: bool = False
    fenced: bool = True

    def parse(self, text: str, tools: Mapping[str, JsonSchema], truncated: bool = False) -> ParsedTurn:
        """Reads one turn; `truncated`: the token cap ended it."""
        text = text[: end_of_turn(text, _STOPS)]
        split = split_reasoning(text, prefilled=self.prefilled_thought)
        if split.unclosed is not None:
            problem = unclosed_thought(text, split.unclosed, (BEGIN_ALL, BEGIN), truncated)
            return turn([], [], problem, split.reasoning)
        start = text.find(BEGIN_ALL, split.rest)
        content = [text[split.rest : start if start >= 0 else len(text)]]
        calls: list[ToolCall] = []
        found: Problem | int | None = _stray(text, split.rest, start if start >= 0 else len(text))
        if found is None and start >= 0:
            found = self._calls(text, start, truncated, calls)
            if isinstance(found, int):
                content.append(text[found:])
                found = _stray(text, found, len(text)) or _second(text, found)
        elif found is None and truncated:
            found = cut_opening(text, split.rest, (BEGIN_ALL,))
        return turn(content, calls, None if isinstance(found, int) else found, split.reasoning)

    def _calls(self, text: str, start: int, truncated: bool, calls: list[ToolCall]) -> Problem | int:
        """Reads the calls of one group; the offset after it."""
        position = start + len(BEGIN_ALL)
        while True:
            position = skip_space(text, position, len(text))
            if text.startswith(END_ALL, position) and calls:
                return position + len(END_ALL)
            if position == len(text) and calls and not truncated:
                return position
            if not text.startswith(BEGIN, position):
                rest = len(text) - position
                if truncated and any(text[position:] == tag[:rest] for tag in (BEGIN, END_ALL)):
                    return Truncated(position, f"the token cap cut the turn before {END_ALL}")
                return Malformed("shape", position, f"expected {BEGIN}" + (f" or {END_ALL}" if calls else ""))
            end = text.find(END, position)
            nested = text.find(BEGIN, position + len(BEGIN), end if end >= 0 else len(text))
            if end < 0 and nested < 0 and truncated:
                return Truncated(position, f"the token cap cut the turn before {END}")
            if end < 0 or nested >= 0:
                return Malformed("unterminated", position, f"{BEGIN} without {END}")
            call = self._read_call(text, position + len(BEGIN), end)
            if isinstance(call, Malformed):
                return call
            calls.append(call)
            position = end + len(END)

    def _read_call(self, text: str, start: int, end: int) -> ToolCall | Malformed:
        sep = text.find(SEP, start, end)
        if sep < 0:
            return Malformed("shape", start, f"expected {SEP} in a call")
        body, name = sep + len(SEP), text[start:sep].strip()
        if self.fenced:
            if name != "function":
                return Malformed("shape", start, f"expected the type 'function', got {name[:40]!r}")
            fence, close = text.find(_FENCE, body, end), text[body:end].rstrip()
            if fence < 0 or not close.endswith(_FENCE_CLOSE) or len(close) < fence - body + len(_FENCE + _FENCE_CLOSE):
                return Malformed("shape", body, "expected the arguments in a ```json fence")
            name, body, end = text[body:fence].strip(), fence + len(_FENCE), body + len(close) - len(_FENCE_CLOSE)
        if not name or "\n" in name or SEP in name:
            return Malformed("name", start, "a call without a usable name")
        try:
            return ToolCall(name, load_arguments(load_json(text[body:end])))
        except TypeError as error:
            return Malformed("shape", body, str(error))
        except ValueError as error:
            return Malformed("json", body, f"arguments are not JSON: {error}")


def _stray(text: str, start: int, end: int) -> Malformed | None:
    """The first piece of a call outside any group."""
    found = [(at, tag) for tag in (BEGIN, SEP, END, END_ALL) if (at := text.find(tag, start, end)) >= 0]
    if not found:
        return None
    at, tag = min(found)
    return Malformed("stray_close" if tag in (END, END_ALL) else "stray", at, f"{tag} outside {BEGIN_ALL}")


def _second(text: str, start: int) -> Malformed | None:
    at = text.find(BEGIN_ALL, start)
    return None if at < 0 else Malformed("shape", at, f"a second {BEGIN_ALL} in one turn")
