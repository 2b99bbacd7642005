"""What a shown ledger says: every token once, its provenance, its control tokens, and nothing that acts."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

from deskrl.cli import app
from deskrl.tokens import ChatMLRenderer, ChatTokenizer, SpanKind, TokenLedger, TokenLedgerError
from deskrl.tokens.show import CSS, Piece, html_page, pieces, show, show_html

_EXAMPLES = settings(deadline=None, max_examples=50)


def _ledger(renderer: ChatMLRenderer, said: list[int], result: str = "21 °C", finish: str = "stop") -> TokenLedger:
    ledger = TokenLedger(renderer.tokenizer.vocabulary_size)
    ledger.append_prompt(renderer.prompt([{"role": "user", "content": "How warm?"}], []))
    ledger.append_generation(
        said, [-0.5] * len(said), weight_version_start=3, weight_version_end=4, finish_reason=finish
    )
    ledger.append_close(renderer.close(said))
    ledger.append_observation(renderer.observation([result]))
    ledger.append_generation([], [])
    ledger.append_close(renderer.close([]))
    ledger.append_injected(renderer.user_message("Again, please."))
    return ledger


def _pieces(ledger: TokenLedger, tokenizer: ChatTokenizer, each_token: bool) -> list[Piece]:
    return list(
        pieces(
            ledger,
            tokenizer.decode,
            lambda i: tokenizer.decode([i], skip_special_tokens=True) == "",
            each_token=each_token,
        )
    )


class _Spans(HTMLParser):
    """(classes, title, text) of each span."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[list[str], str, str]] = []
        self.others: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "span":
            values = dict(attrs)
            assert set(values) == {"class", "title"}
            self.found.append(((values["class"] or "").split(), values["title"] or "", ""))
        else:
            self.others.append(tag)

    def handle_data(self, data: str) -> None:
        classes, title, text = self.found[-1]
        self.found[-1] = classes, title, text + data


def _styles(text: Text, of: str) -> set[str]:
    """Styles of the spans whose text holds `of`."""
    return {str(s.style) for s in text.spans if of in text.plain[s.start : s.end]}


def test_a_terminal_shows_provenance_and_control_tokens(renderer: ChatMLRenderer) -> None:
    tokenizer = renderer.tokenizer
    said = tokenizer.encode_template("Warm. Ünïcode 🙂<|im_end|>")
    ledger = _ledger(renderer, said, "a mail says <|im_end|>")
    text = show(ledger, tokenizer)
    assert text.plain == tokenizer.decode(ledger.ids)
    assert _styles(text, "Warm.") == {"bold green"}
    assert _styles(text, "How warm?") == {"dim"}
    assert _styles(text, "a mail says") == {"cyan"}
    assert _styles(text, "Again, please.") == {"yellow"}
    # Sampled, closed by the template, and spelled out by a tool: three different things.
    assert {"bold green reverse", "cyan", "dim reverse"} <= _styles(text, "<|im_end|>")
    assert _styles(text, "a mail says <|im_end|>") == {"cyan"}


def test_html_is_the_same_text_with_classes(renderer: ChatMLRenderer) -> None:
    tokenizer = renderer.tokenizer
    said = tokenizer.encode_template('<b class="x">&amp; </span><script>1</script>')
    ledger = _ledger(renderer, said, finish="length")
    spans = _Spans(show_html(ledger, tokenizer))
    assert spans.others == ["div"]
    assert "".join(text for _, _, text in spans.found) == tokenizer.decode(ledger.ids)
    (generation,) = [span for span in spans.found if "sampled" in span[0]]
    assert generation == (
        ["sampled"],
        "generation, turn 0, weights 3 to 4, ended by length",
        '<b class="x">&amp; </span><script>1</script>',
    )
    assert {c for classes, _, _ in spans.found for c in classes} == {
        "template", "sampled", "tool", "injected", "control",
    }  # fmt: skip
    page = html_page("a <trial>", show_html(ledger, tokenizer))
    assert CSS in page and "<h1>a &lt;trial&gt;</h1>" in page


def test_titles_carry_values_of_each_token(renderer: ChatMLRenderer) -> None:
    tokenizer = renderer.tokenizer
    said = tokenizer.encode_template("It is\nwarm<|im_end|>")
    ledger = _ledger(renderer, said)
    advantages = [1.5 if mask else float("nan") for mask in ledger.loss_mask]
    spans = _Spans(show_html(ledger, tokenizer, boundaries=True, values={"advantage": advantages})).found
    sampled = [span for span in spans if "sampled" in span[0]]
    assert [int(re.search(r"id (\d+)", title)[1]) for _, title, _ in sampled] == said  # type: ignore[index]
    assert all("logprob -0.5; advantage 1.5" in title and "token" in classes for classes, title, _ in sampled)
    assert "".join(text for _, _, text in sampled) == "It is↵\nwarm<|im_end|>"
    assert not any("advantage" in t or "logprob" in t for classes, t, _ in spans if "sampled" not in classes)
    with pytest.raises(TokenLedgerError, match=f"1 values of 'advantage' for {len(ledger)} tokens"):
        show_html(ledger, tokenizer, values={"advantage": [1.0]})


@_EXAMPLES
@given(st.data())
def test_every_token_is_in_one_piece(renderer: ChatMLRenderer, data: st.DataObject) -> None:
    tokenizer = renderer.tokenizer
    text = data.draw(st.text(max_size=20))
    ids = tokenizer.encode_content(text)
    said = data.draw(st.one_of(st.just(ids), st.lists(st.integers(0, tokenizer.vocabulary_size - 1), max_size=12)))
    said = said[: data.draw(st.integers(0, len(said)))]
    ledger = _ledger(renderer, said)
    for each_token in (False, True):
        found = _pieces(ledger, tokenizer, each_token)
        assert [p.start for p in found] + [len(ledger)] == [0, *(p.end for p in found)]
        assert all(p.text for p in found)
        for piece in found:
            # Either the tokens' own text, or their id.
            own = tokenizer.decode(ledger.ids[piece.start : piece.end])
            assert piece.text == own if "\ufffd" not in own else piece.text == f"⟨#{ledger.ids[piece.start]}⟩"
            assert not each_token or piece.end - piece.start == 1 or not piece.text.isascii()


def test_a_character_of_several_tokens_stays_whole_and_a_cut_one_is_not_lost(renderer: ChatMLRenderer) -> None:
    tokenizer = renderer.tokenizer
    ids = tokenizer.encode_content("🙂")
    assert len(ids) > 1
    whole = [p for p in _pieces(_ledger(renderer, ids * 2), tokenizer, True) if p.span.kind is SpanKind.GENERATION]
    assert [(p.text, p.end - p.start) for p in whole] == [("🙂", len(ids))] * 2
    cut = show(_ledger(renderer, [*ids, *ids[:-1]], finish="length"), tokenizer).plain
    assert "🙂" + "".join(f"⟨#{i}⟩" for i in ids[:-1]) + "<|im_end|>" in cut
    assert "\ufffd" not in cut


def test_nothing_in_the_text_acts(renderer: ChatMLRenderer) -> None:
    tokenizer = renderer.tokenizer
    ledger = _ledger(renderer, tokenizer.encode_content("a"), "\x1b[2J\x1b]0;t\x07 \r\x9b1m [bold]x[/] \u202egnp")
    text = show(ledger, tokenizer)
    assert "␛[2J␛]0;t␇ ␍\\u009b1m [bold]x[/] \\u202egnp" in text.plain
    out = io.StringIO()
    Console(file=out, width=200, force_terminal=False).print(text)
    assert "\x1b" not in out.getvalue() and "[bold]x[/]" in out.getvalue()
    assert not set("\x1b\x07\x9b\r\u202e") & set(show_html(ledger, tokenizer))


def test_boundaries_mark_each_token(renderer: ChatMLRenderer) -> None:
    tokenizer = renderer.tokenizer
    said = tokenizer.encode_content("unbelievable things")
    shown = show(_ledger(renderer, said), tokenizer, boundaries=True).plain
    assert "│" + "│".join(tokenizer.decode([i]) for i in said) + "│<|im_end|>" in shown


class _Metaspace:
    """A decoder that drops the space in front of the first word, as sentencepiece does; id 9 has no text."""

    words = ("▁the", "▁old", "▁man", "s")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(self.words[i] for i in ids if i < len(self.words)).replace("▁", " ").removeprefix(" ")


def test_spaces_between_words_survive_a_decoder_that_trims() -> None:
    ledger = TokenLedger()
    ledger.append_prompt([0, 1, 2, 3, 9, 2])
    assert show(ledger, _Metaspace(), boundaries=True).plain == "│the│ old│ man│s│⟨#9⟩│man"
    assert show(ledger, _Metaspace()).plain == "the old mans⟨#9⟩man"


def _trial(folder: Path, ledger: TokenLedger, model_dir: Path) -> Path:
    (folder / "agent").mkdir(parents=True)
    (folder / "agent/tokens.npz").write_bytes(ledger.to_bytes())
    (folder / "config.json").write_text(json.dumps({"agent": {"kwargs": {"model_dir": str(model_dir)}}}))
    return folder


def test_the_command_shows_a_trial_and_writes_a_page(renderer: ChatMLRenderer, model_dir: Path, tmp_path: Path) -> None:
    ledger = _ledger(renderer, renderer.tokenizer.encode_template("Warm.<|im_end|>"))
    trial = _trial(tmp_path / "trial-1", ledger, model_dir)
    shown = CliRunner().invoke(app, ["trial", "show", str(trial)])
    assert shown.exit_code == 0, shown.output
    assert (
        "Warm.<|im_end|>" in shown.output and f"{len(ledger)} tokens, {ledger.sampled} sampled, 2 turns" in shown.output
    )
    page = tmp_path / "page.html"
    assert CliRunner().invoke(app, ["trial", "show", str(trial), "--html", str(page), "--boundaries"]).exit_code == 0
    assert "logprob -0.5" in page.read_text() and page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("remove", "write", "message"),
    [
        ("agent/tokens.npz", None, "tokens.npz: not there"),
        ("agent/tokens.npz", "x", "not a token ledger"),
        ("config.json", "{}", "--model-dir"),
        ("config.json", '{"agent": {"kwargs": {"model_dir": "/nowhere"}}}', "/nowhere"),
    ],
)
def test_a_trial_that_cannot_be_shown_is_a_message(
    renderer: ChatMLRenderer, model_dir: Path, tmp_path: Path, remove: str, write: str | None, message: str
) -> None:
    trial = _trial(tmp_path / "trial-1", _ledger(renderer, []), model_dir)
    (trial / remove).unlink()
    if write is not None:
        (trial / remove).write_text(write)
    failed = CliRunner().invoke(app, ["trial", "show", str(trial)])
    assert failed.exit_code == 2 and message in failed.output and "Traceback" not in failed.output
