"""Derives a template's `Forms` by rendering probe conversations and looking at what is around their texts.

What the template writes between the last argument of a call and the token that ends the turn is the model's to
sample; from that token on it is the tail. Nothing here is believed: `prove` checks it on other conversations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from deskrl.tokens.chat import ChatTemplateError, ChatTokenizer
from deskrl.tokens.renderers import probe
from deskrl.tokens.renderers.base import RendererError
from deskrl.tokens.renderers.families import Family
from deskrl.tokens.renderers.forms import NAME_HOLE, Forms, ResultForm, UserForm
from deskrl.tokens.renderers.probe import Dialect
from deskrl.tokens.renderers.reasoning import ReasoningTags

# How results are written for a template that knows no tools: in a user turn, in Qwen's wording.
RESULT_OPEN, RESULT_CLOSE = "<tool_response>\n", "\n</tool_response>"


@dataclass(frozen=True)
class _Tail:
    """A tail cut at its holes; `end` is its first token."""

    end: str
    before: str
    after: str
    transform: str
    between: str = ""


def derive(tokenizer: ChatTokenizer, family: Family) -> Forms:
    """The template's forms.

    Raises:
        RendererError: they cannot be told from probes; the message says why.
    """
    for token in family.needs:
        if token not in tokenizer.control_tokens:
            raise RendererError(
                f"the tokenizer has no control token {token!r}: not a model of the family {family.name}"
            )
    try:
        dialect = _with_or_without_system(tokenizer)
        tools = probe.NAME in probe.render(tokenizer, dialect.start(), True)
        user = _user_tail(tokenizer, family, dialect, tools)
        calls = tools or _renders_calls(tokenizer, dialect)
        example = ""
        if calls:
            dialect = _call_dialect(tokenizer, dialect)
            result = _result_tail(tokenizer, family, dialect, user.end)
            example = _example(tokenizer, dialect, result.end)
        else:
            before, after = user.before + RESULT_OPEN, RESULT_CLOSE + user.after
            result = _Tail(user.end, before, after, "as it is", between=f"{RESULT_CLOSE}\n{RESULT_OPEN}")
        reasoning, shown = _reasoning(tokenizer, family, dialect, tools)
        prompt = probe.render(tokenizer, dialect.start(), tools)
        opener = _is_opener(tokenizer, prompt, user)
    except ChatTemplateError as error:
        raise RendererError(f"the chat template does not render a probe conversation: {error}") from error
    without = probe.render(tokenizer, dialect.start(), tools, prompt=False)
    prefill = reasoning.prefill(prompt[len(without) :] if prompt.startswith(without) else user.after)
    for what, after in (("user message", user.after), ("tool result", result.after)):
        if reasoning.is_open(reasoning.prefill(after)) != reasoning.is_open(prefill):
            raise RendererError(
                f"the generation prompt of the first turn ends in {prefill!r}, the one after a {what} in {after!r}: "
                "whether a turn starts inside reasoning would depend on its place"
            )
    return replace(
        _forms(tokenizer, family, user, result, opener),
        reasoning=reasoning,
        prefill=prefill,
        template_tools=tools,
        template_calls=calls,
        call_example=example,
        call_content=dialect.call_content,
        arguments_as_text=dialect.arguments_as_text,
        shows_reasoning=shown,
    )


def _forms(tokenizer: ChatTokenizer, family: Family, user: _Tail, result: _Tail, opener: bool) -> Forms:
    ends = {user.end, result.end, *family.ends} if family.template_end_stops else set(family.ends)
    end, after_end = "", ""
    if not opener:
        if user.end != result.end and not {user.end, result.end} & set(family.ends):
            raise RendererError(
                f"an answer ends with {user.end!r}, a turn of calls with {result.end!r}: how to close a turn that "
                "was cut is not known; this model needs a renderer of its own family"
            )
        end = user.end
        after_end = _common_text(tokenizer, user, result)

    def opening(tail: _Tail) -> str:
        return tail.end + tail.before if opener else tail.before[len(after_end) :]

    return Forms(
        end=end,
        call_end=result.end if end else "",
        after_end=after_end,
        ends=frozenset(name for name in ends if name in tokenizer.control_tokens),
        result=ResultForm(opening(result), result.between, result.after, result.transform),
        user=UserForm(opening(user), user.after, user.transform),
        reasoning=ReasoningTags(),
        prefill="",
        template_tools=False,
        template_calls=False,
    )


def _common_text(tokenizer: ChatTokenizer, user: _Tail, result: _Tail) -> str:
    """The plain text both tails have between the terminator and their next control token."""
    first = [tokenizer.controls_in(tail.before) for tail in (user, result)]
    if not all(first):
        return ""
    texts = {tail.before[: controls[0][0]] for tail, controls in zip((user, result), first, strict=True)}
    return texts.pop() if len(texts) == 1 else ""


def _with_or_without_system(tokenizer: ChatTokenizer) -> Dialect:
    for dialect in (Dialect(), Dialect(system=False)):
        try:
            probe.render(tokenizer, dialect.start(), False)
        except ChatTemplateError as error:
            refused = error
        else:
            return dialect
    raise refused


def _call_dialect(tokenizer: ChatTokenizer, dialect: Dialect) -> Dialect:
    refused = ""
    for as_text in (False, True):
        for content in ("", None):
            tried = replace(dialect, call_content=content, arguments_as_text=as_text)
            messages = [*tried.start(), tried.calls(1), *probe.results(["zqresult"])]
            try:
                text = probe.render(tokenizer, messages, True)
            except ChatTemplateError as error:
                refused = f": {error}"
                continue
            if probe.VALUE in text and "zqresult" in text:
                return tried
    raise RendererError(f"the template renders tool definitions but no tool call with its result{refused}")


def _renders_calls(tokenizer: ChatTokenizer, dialect: Dialect) -> bool:
    try:
        _call_dialect(tokenizer, dialect)
    except RendererError:
        return False
    return True


def _example(tokenizer: ChatTokenizer, dialect: Dialect, end: str) -> str:
    """A turn of one call, from the generation prompt to its end."""
    prompt = probe.render(tokenizer, dialect.start(), True)
    for reasoning in (False, True):  # a prompt that opens a thought may only be continued by a turn with one
        messages = [*dialect.start(), dialect.calls(1, reasoning), *probe.results(["zqresult"])]
        text = probe.render(tokenizer, messages, True)
        text = text[: text.index(end, text.rindex(probe.VALUE))]
        if text.startswith(prompt):
            return text.removeprefix(prompt)
    return text.removeprefix(probe.render(tokenizer, dialect.start(), True, prompt=False))


def _user_tail(tokenizer: ChatTokenizer, family: Family, dialect: Dialect, tools: bool) -> _Tail:
    content = probe.odd(probe.NEXT)
    text = probe.render(tokenizer, [*dialect.start(), dialect.answer(), probe.user(content)], tools)
    _, answered, _ = probe.locate(text, probe.ANSWER, "an answer")
    start, stop, transform = probe.locate(text, content, "a user message")
    end, position = _end_in(tokenizer, family, text[answered:start], None, "an answer")
    return _Tail(end, text[answered + position + len(end) : start], text[stop:], transform)


def _result_tail(tokenizer: ChatTokenizer, family: Family, dialect: Dialect, user_end: str) -> _Tail:
    contents = [probe.odd(f"zqresult{letter}") for letter in "abc"]
    found: list[tuple[str, list[str], str, str]] = []
    for count in (1, 2, 3):
        messages = probe.with_results(tokenizer, dialect, dialect.start(), contents[:count])
        text = probe.render(tokenizer, messages, True)
        places = [probe.locate(text, content, "a tool result") for content in contents[:count]]
        if places != sorted(places) or len({transform for _, _, transform in places}) != 1:
            raise RendererError("the template does not write parallel tool results in order and alike")
        called = text.rindex(probe.VALUE, 0, places[0][0]) + len(probe.VALUE)
        region = text[called : places[0][0]]
        end, position = _end_in(tokenizer, family, region, user_end, "a turn of calls")
        stops = [stop for _, stop, _ in places]
        starts = [start for start, _, _ in places[1:]]
        between = [text[a:b].replace(probe.NAME, NAME_HOLE) for a, b in zip(stops, starts, strict=False)]
        before = region[position + len(end) :].replace(probe.NAME, NAME_HOLE)
        found.append((end + before, between, text[stops[-1] :], places[0][2]))
        if "zqcall" in region[position:] + "".join(between) + text[stops[-1] :]:
            raise RendererError("the template writes call ids with tool results, which a sampled turn need not have")
    before, between, after, transform = found[2]
    same = len({(b, a, t) for b, _, a, t in found}) == 1 and between[0] == between[1] == found[1][1][0]
    if not same or between[0].count(NAME_HOLE) > 1 or probe.NAME in after:
        raise RendererError(f"the template writes one, two and three tool results in different ways: {found}")
    end = tokenizer.controls_in(before)[0][1]
    return _Tail(end, before[len(end) :], after, transform, between[0])


def _end_in(tokenizer: ChatTokenizer, family: Family, region: str, known: str | None, what: str) -> tuple[str, int]:
    """The token that ends a turn, and where it is in the text between the turn's content and what follows."""
    controls = tokenizer.controls_in(region)
    wanted = {*family.ends, *([known] if known else [])}
    for choice in (wanted, tokenizer.special_names, set(tokenizer.control_tokens)):
        for position, name in controls:
            if name in choice:
                return name, position
    raise RendererError(
        f"no control token ends {what} in this template, only {region!r}: text that follows would merge with "
        "sampled tokens"
    )


def _is_opener(tokenizer: ChatTokenizer, prompt: str, user: _Tail) -> bool:
    """Whether the token that ends an answer is the one that opens a user turn."""
    before = tokenizer.controls_in(prompt[: prompt.index(probe.USER)])
    return bool(before) and before[-1][1] == user.end and not tokenizer.controls_in(user.before)


def _reasoning(tokenizer: ChatTokenizer, family: Family, dialect: Dialect, tools: bool) -> tuple[ReasoningTags, bool]:
    """How the template ends a thought, and whether it shows one at all."""
    text = probe.render(tokenizer, [*dialect.start(), dialect.answer(reasoning=True)], tools, prompt=False)
    if probe.THOUGHT not in text:
        return family.reasoning, False
    thought = text.rindex(probe.THOUGHT) + len(probe.THOUGHT)
    written = text[thought : text.find(probe.ANSWER, thought)]
    tags = family.reasoning
    return (replace(tags, end=written) if tags.closing in written else tags), True
