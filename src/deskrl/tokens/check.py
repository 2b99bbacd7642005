"""Whether a model's chat template, tokenizer, renderer and tool-call parser fit together.

A mismatch between them is silent: a model that was taught XML calls, read by a JSON parser, makes no call at all, and
the run has reward 0. So the template itself is asked how it writes a call, and the parser has to read just that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from deskrl.tokens.chat import ChatTemplateError, ChatTokenizer
from deskrl.tokens.parsing import FAMILIES as PARSERS
from deskrl.tokens.parsing import ParsedTurn, parser_for
from deskrl.tokens.renderers import RendererError, TemplateRenderer, probe, renderer_for

# What looks like a control token in a template's text.
_CONTROL_LIKE = re.compile(r"<[|｜][^<>|｜\s]{1,40}[|｜]>")


@dataclass(frozen=True)
class Finding:
    """One thing that was checked; `fix` says what to do about it when it is not ok."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


def check_model(tokenizer: ChatTokenizer, parser_family: str | None = None) -> list[Finding]:
    """Everything that must hold before a run starts; the model fits if all findings are ok.

    Args:
        parser_family: the parser the run is to use; None: the one the template asks for.
    """
    template = _template(tokenizer)
    if not template.ok:
        return [template]
    try:
        renderer = renderer_for(tokenizer)
    except RendererError as error:
        fix = "use a model whose template only appends, or change the template"
        return [template, Finding("renderer", False, str(error), fix)]
    stops = ", ".join(tokenizer.decode([stop]) for stop in renderer.stop_token_ids)
    told = "; ".join([f"family {renderer.family}", *renderer.notes])
    return [
        template,
        Finding("renderer", True, told),
        Finding("stop tokens", True, stops),
        _syntax(renderer, parser_family),
        *([_parsed(renderer, parser_family)] if parser_family or renderer.call_syntax else []),
    ]


def _template(tokenizer: ChatTokenizer) -> Finding:
    """The template renders, with control tokens that the vocabulary has."""
    dialects = (probe.Dialect(), probe.Dialect(system=False))
    for dialect in dialects:
        try:
            text = probe.render(tokenizer, [*dialect.start(), dialect.answer(), probe.user(probe.NEXT)], False)
            break
        except ChatTemplateError as error:
            refused = str(error)
    else:
        return Finding("chat template", False, refused, "use the template that came with the model")
    missing = sorted(set(_CONTROL_LIKE.findall(text)) - set(tokenizer.control_tokens))
    if missing:
        return Finding(
            "chat template",
            False,
            f"it writes {', '.join(missing)}, which the tokenizer reads as plain text",
            "use the template and the tokenizer of one and the same model",
        )
    return Finding("chat template", True, f"renders, {len(tokenizer.control_tokens)} control tokens")


def _syntax(renderer: TemplateRenderer, parser_family: str | None) -> Finding:
    taught = renderer.call_syntax
    name = "call syntax"
    if not taught and parser_family is None:
        detail = f"the template writes calls in no known syntax: {renderer.call_example!r}"
        return Finding(name, False, detail, f"use a model of {', '.join(PARSERS)}")
    if not taught or parser_family in (None, taught):
        return Finding(name, True, taught or f"not known, parser {parser_family}")
    detail = f"the template teaches {taught}, the parser reads {parser_family}: {renderer.call_example!r}"
    return Finding(name, False, detail, f"use the parser {taught}")


def _parsed(renderer: TemplateRenderer, parser_family: str | None) -> Finding:
    """The parser reads the template's own call."""
    family = parser_family or renderer.call_syntax
    name = f"parser {family}"
    if family not in PARSERS:
        return Finding(name, False, f"there is no such parser, only {', '.join(PARSERS)}", "name one of them")
    parser = parser_for(family, prefilled_thought=renderer.prefilled_thought)
    schema = probe.TOOL["function"]["parameters"]
    read = parser.parse(renderer.call_example, {probe.NAME: schema})
    calls = [(call.name, call.arguments) for call in read.calls]
    if calls == [(probe.NAME, {probe.KEY: probe.VALUE})]:
        return Finding(name, True, "reads the template's own call")
    detail = f"cannot read the template's own call {renderer.call_example!r}: {_outcome(read)}"
    fix = f"use the parser {renderer.call_syntax}" if renderer.call_syntax not in ("", family) else "report this model"
    return Finding(name, False, detail, fix)


def _outcome(read: ParsedTurn) -> str:
    problem = read.malformed or read.truncated or read.inside_reasoning
    return problem.detail if problem is not None else f"{len(read.calls)} calls {read.calls}"
