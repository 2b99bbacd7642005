"""The token-exactness cases that concern the stream as a whole; rendering and parsing have theirs beside them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deskrl.tokens import (
    ChatMLRenderer,
    RendererError,
    TokenLedger,
    TokenLedgerError,
    Trajectories,
    parser_for,
    renderer_for,
)


def split_differently(renderer: ChatMLRenderer) -> list[int]:
    """Ids of a text that its own text would not be encoded to: each character by itself."""
    text = "_Skinny tokens"
    ids = [token for character in text for token in renderer.tokenizer.encode_content(character)]
    assert renderer.tokenizer.decode(ids) == text and renderer.tokenizer.encode_content(text) != ids
    return ids


def conversation(renderer: ChatMLRenderer, *turns: list[int]) -> TokenLedger:
    ledger = TokenLedger(renderer.tokenizer.vocabulary_size)
    ledger.append_prompt(renderer.prompt([{"role": "user", "content": "q"}], []))
    for turn in turns:
        ledger.append_generation(turn, [-0.5] * len(turn))
        ledger.append_close(renderer.close(turn))
        ledger.append_observation(renderer.observation(["r"], after=turn))
    return ledger


def test_case_09_ids_that_encode_differently_stay_as_they_were_sampled(renderer: ChatMLRenderer) -> None:
    sampled = split_differently(renderer)
    ledger = conversation(renderer, sampled, [*sampled, renderer.stop_token_ids[0]])
    trained = [i for i, mask in zip(ledger.ids, ledger.loss_mask, strict=True) if mask]
    assert trained == [*sampled, *sampled, renderer.stop_token_ids[0]]


@pytest.mark.parametrize("arguments", ['{"a":1}', '{"a": 1}', '{ "b" : 2, "a":1 }', '{"a": 1, "b": 2}'])
def test_case_10_spacing_and_order_of_arguments_leave_the_history_alone(
    renderer: ChatMLRenderer, arguments: str
) -> None:
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    ids = [*renderer.tokenizer.encode_content(text), renderer.stop_token_ids[0]]
    parsed = parser_for("hermes").parse(renderer.text(ids), {"f": {}})
    assert parsed.calls[0].arguments == json.loads(arguments)
    ledger = conversation(renderer, ids)
    (span,) = [s for s in ledger.spans if s.kind == "generation"]
    assert ledger.ids[span.start : span.end] == ids


def test_case_17_logprobs_of_another_length_are_refused_with_both_lengths(renderer: ChatMLRenderer) -> None:
    ledger = conversation(renderer, [5, 6])
    before = ledger.ids
    with pytest.raises(TokenLedgerError, match=r"turn 1: 3 sampled ids but 4 logprobs"):
        ledger.append_generation([7, 8, 9], [-0.1] * 4)
    assert ledger.ids == before


def test_case_19_the_prefix_holds_every_earlier_completion(renderer: ChatMLRenderer) -> None:
    turns = [[10 + n, 20 + n, renderer.stop_token_ids[0]] for n in range(6)]
    ledger, seen = TokenLedger(), []
    ledger.append_prompt(renderer.prompt([{"role": "user", "content": "q"}], []))
    for turn in turns:
        seen.append(ledger.ids)
        ledger.append_generation(turn, [-0.5] * len(turn))
        ledger.append_close(renderer.close(turn))
        ledger.append_observation(renderer.observation(["r"], after=turn))
    for n, prefix in enumerate(seen[1:], 1):
        assert prefix[: len(seen[n - 1]) + 3] == seen[n - 1] + turns[n - 1]


def test_case_20_a_shared_turn_of_a_fork_trains_once(renderer: ChatMLRenderer) -> None:
    shared, own, forked = [5, 6], [7], [8, 9]
    parent = conversation(renderer, shared)
    fork = parent.fork(len(parent))
    parent.append_generation(own, [-0.5])
    fork.append_generation(forked, [-0.5, -0.5])
    branches = Trajectories(parent).branches()
    trained = sorted(i for b in branches for i, mask in zip(b.response_ids, b.mask, strict=True) if mask)
    assert len(branches) == 2 and trained == sorted([*shared, *own, *forked])


GOOD: dict[str, Any] = {"type": "function", "function": {"name": "good", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"name": "f"}, "expected"),
        ({"type": "function", "function": {"name": ""}}, "non-empty"),
        ({"type": "function", "function": {"name": "f", "parameters": ["a"]}}, "not list"),
        ({"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}, "not 'string'"),
        ({"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": 3}}}}, "properties"),
        ({"type": "function", "function": {"name": "f", "parameters": {"required": "a"}}}, "required"),
        ({"type": "function", "function": {"name": "f", "parameters": {"default": float("nan")}}}, "not JSON"),
        (GOOD, "twice"),
    ],
)
def test_a_tool_that_is_no_definition_is_refused_by_turn_place_and_name(
    renderer: ChatMLRenderer, bad: dict[str, Any], words: str
) -> None:
    for each in (renderer, renderer_for(renderer.tokenizer)):
        with pytest.raises(RendererError, match="turn 0: tool 2 of 2") as error:
            each.prompt([{"role": "user", "content": "q"}], [GOOD, bad])
        assert words in str(error.value)
