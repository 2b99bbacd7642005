"""gpt-oss turns in the harmony format: messages on channels, calls addressed to `functions.NAME`.

    <|channel|>analysis<|message|>THOUGHT<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>ANSWER<|return|>

The prompt holds the first `<|start|>assistant`. Decode with special tokens kept (the stop token `<|call|>` or
`<|return|>` too), or the structure is lost. `analysis` is the thought; `final`, and `commentary` to nobody, are the
message. A message to a function is a call on any channel: the address makes it one, and its own stop ends it. The JSON
carries its own types.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from deskrl.tokens.parsing.jsonvalue import load_arguments, load_json
from deskrl.tokens.parsing.outcome import InsideReasoning, Malformed, ParsedTurn, Problem, ToolCall, Truncated, turn
from deskrl.tokens.parsing.schema import JsonSchema

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
CHANNELS = ("analysis", "commentary", "final")
_CONTROL = re.compile(r"<\|(?:start|channel|constrain|message|end|call|return)\|>")
# Before the channel: the role, left to the prompt in the first message, and perhaps the address.
_ROLE = re.compile(r"\s*(?:<\|start\|>\s*assistant)?\s*(?:to=([^\s<]+)\s*)?")
# After it: its name, perhaps the address, and perhaps the content's type.
_CHANNEL = re.compile(r"\s*(\w+)(?:\s+to=([^\s<]+))?(?:\s*<\|constrain\|>\s*[\w./-]+|\s+[\w./-]+)?\s*")
# Tools of the model's maker that are no functions and that no environment here offers.
_BUILT_IN = frozenset({"python", "browser", "container"})


@dataclass
class _Turn:
    content: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True)
class _Header:
    start: int
    channel: str
    recipient: str | None


@dataclass(frozen=True)
class HarmonyParser:
    """Reads gpt-oss turns."""

    def parse(self, text: str, tools: Mapping[str, JsonSchema], truncated: bool = False) -> ParsedTurn:
        """Reads one turn; `truncated`: the token cap ended it."""
        read = _Turn()
        problem = _scan(text, truncated, read)
        reasoning = "\n".join(thought.strip() for thought in read.thoughts) if read.thoughts else None
        return turn(["\n".join(read.content)], read.calls, problem, reasoning)


def _scan(text: str, truncated: bool, read: _Turn) -> Problem | None:
    position, length = 0, len(text.rstrip())
    while position < length:
        header = _header(text, position, truncated)
        if not isinstance(header, _Header):
            return header
        body = text.index(MESSAGE, position) + len(MESSAGE)
        mark = _CONTROL.search(text, body)
        end = len(text) if mark is None else mark.start()
        closing = None if mark is None else mark.group()
        if closing not in (None, END, CALL, RETURN):
            return Malformed("unterminated", header.start, f"{closing} inside a message")
        problem = _message(header, text[body:end], body, closing, truncated, read)
        if problem is not None or mark is None:
            return problem
        position = mark.end()
    return None


def _header(text: str, position: int, truncated: bool) -> _Header | Problem:
    """Reads up to `<|message|>`; the role, the channel, the address and the type come in either of two orders."""
    message = text.find(MESSAGE, position)
    if message < 0:
        if truncated:
            return Truncated(position, f"the token cap cut the turn before {MESSAGE}")
        return Malformed("unterminated", position, f"a message without {MESSAGE}")
    header = text[position:message]
    if bool(position) != header.lstrip().startswith(START):
        expected = f"{START} after a message's end" if position else f"no {START}, the prompt holds it"
        return Malformed("shape", position, f"expected {expected}")
    if (mark := re.search(r"<\|(?:end|call|return)\|>", header)) is not None:
        return Malformed("stray_close", position + mark.start(), f"{mark.group()} before {MESSAGE}")
    before, separator, after = header.partition(CHANNEL)
    role, rest = _ROLE.fullmatch(before), _CHANNEL.fullmatch(after)
    if not separator or role is None or rest is None:
        return Malformed(
            "shape", position, f"expected {START}assistant{CHANNEL}CHANNEL to=NAME {CONSTRAIN}TYPE{MESSAGE}"
        )
    channel = rest.group(1)
    if channel not in CHANNELS:
        return Malformed("shape", position, f"expected a channel of {', '.join(CHANNELS)}, got {channel[:40]!r}")
    if role.group(1) and rest.group(2):
        return Malformed("recipient", position, "a message with two addresses")
    return _Header(position, channel, role.group(1) or rest.group(2))


def _message(header: _Header, body: str, at: int, closing: str | None, truncated: bool, read: _Turn) -> Problem | None:
    if header.recipient is not None:
        return _call(header, header.recipient, body, at, closing, truncated, read)
    if header.channel == "analysis":
        read.thoughts.append(body)
        if closing is None:
            if truncated:
                return Truncated(header.start, "the token cap cut the turn inside the analysis channel")
            return InsideReasoning(header.start, "the turn ended inside the analysis channel")
        return None
    read.content.append(body.strip())
    if closing == CALL:
        return Malformed("recipient", header.start, f"{CALL} after a message to nobody")
    return None


def _call(
    header: _Header, recipient: str, body: str, at: int, closing: str | None, truncated: bool, read: _Turn
) -> Problem | None:
    name = recipient.removeprefix("functions.")
    if not name or recipient == "assistant" or recipient.split(".")[0] in _BUILT_IN:
        return Malformed("recipient", header.start, f"expected to=functions.NAME, got to={recipient[:40]}")
    if closing is None and truncated:
        return Truncated(header.start, f"the token cap cut the turn before {CALL}")
    if closing != CALL:
        return Malformed("unterminated", header.start, f"a call without {CALL}")
    try:
        read.calls.append(ToolCall(name, load_arguments(load_json(body))))
    except TypeError as error:
        return Malformed("shape", at, str(error))
    except ValueError as error:
        return Malformed("json", at, f"arguments are not JSON: {error}")
    return None
