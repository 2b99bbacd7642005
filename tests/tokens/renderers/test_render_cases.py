"""The conformance cases that concern rendering, one by one, each on the family that it was seen on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from render_models import TEMPLATES

from deskrl.tokens import ChatMLRenderer, ChatTokenizer, TokenLedger
from deskrl.tokens.chat import Trust
from deskrl.tokens.renderers import TemplateRenderer, TurnRenderer, renderer_for
from deskrl.tokens.renderers.harmony import HarmonyRenderer

Load = Callable[[str], ChatTokenizer]

_START = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Reads.",
            "parameters": {"type": "object", "properties": {"p": {"type": "string"}}},
        },
    }
]
_EVERY = ["smollm2", "qwen3", "qwen35", "glm46", "glm47", "llama31", "deepseek_v3", "deepseek_v31", "harmony"]
_CALLS = {
    "smollm2": '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>',
    "qwen3": '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>',
    "qwen35": "Hm.\n</think>\n\n<tool_call>\n<function=read>\n</function>\n</tool_call>",
    "glm46": "\n<think></think>\n<tool_call>read\n</tool_call>",
    "glm47": "Hm.</think><tool_call>read</tool_call>",
    "llama31": '{"name": "read", "parameters": {}}',
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>read\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>read<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "harmony": "<|channel|>commentary to=functions.read <|constrain|>json<|message|>{}",
}
_END = {
    "smollm2": "<|im_end|>\n",
    "qwen3": "<|im_end|>\n",
    "qwen35": "<|im_end|>\n",
    "glm46": "",
    "glm47": "",
    "llama31": "<|eot_id|>",
    "deepseek_v3": "<｜end▁of▁sentence｜>",
    "deepseek_v31": "<｜end▁of▁sentence｜>",
    "harmony": "<|call|>",
}


def ids(renderer: TurnRenderer, text: str) -> list[int]:
    """Ids of a text with control tokens in it, as a model would sample them."""
    return renderer.tokenizer.encode_pieces([(text, Trust.TEMPLATE)])


def written(renderer: TurnRenderer, tokens: list[int]) -> str:
    return renderer.tokenizer.decode(tokens)


def record(renderer: TurnRenderer, generated: list[int], results: list[str]) -> TokenLedger:
    """A ledger with a prompt, one turn, its close and its observation."""
    ledger = TokenLedger(renderer.tokenizer.vocabulary_size)
    ledger.append_prompt(renderer.prompt(_START, _TOOLS))
    ledger.append_generation(generated, [-0.5] * len(generated))
    ledger.append_close(renderer.close(generated))
    ledger.append_observation(renderer.observation(results, names=["read"] * len(results), after=generated))
    return ledger


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "qwen35"])
def test_case_01_one_newline_after_a_sampled_im_end(load: Load, name: str) -> None:
    renderer = renderer_for(load(name))
    generated = ids(renderer, _CALLS[name] + "<|im_end|>")
    assert written(renderer, renderer.close(generated)) == "\n"
    ledger = record(renderer, generated, ["r"])
    assert "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nr\n" in written(renderer, ledger.ids)
    assert ledger.loss_mask[-len(ledger.ids) :].count(1) == len(generated)


@pytest.mark.parametrize("name", ["glm46", "glm47"])
def test_case_02_a_sampled_observation_token_is_there_once_and_trained(load: Load, name: str) -> None:
    renderer = renderer_for(load(name))
    observation = renderer.tokenizer.control_tokens["<|observation|>"]
    assert observation in renderer.stop_token_ids
    generated = ids(renderer, _CALLS[name] + "<|observation|>")
    ledger = record(renderer, generated, ["one", "two"])
    assert ledger.ids.count(observation) == 1
    at = ledger.ids.index(observation)
    assert ledger.loss_mask[at] == 1 and ledger.logprobs[at] == -0.5
    # The same ids as if the token had not been sampled, only the mask differs.
    cut = record(renderer, generated[:-1], ["one", "two"])
    assert cut.ids == ledger.ids and cut.loss_mask[at] == 0


@pytest.mark.parametrize("name", ["glm46", "glm47"])
def test_case_03_glm_user_token_after_a_call(load: Load, name: str) -> None:
    renderer = renderer_for(load(name))
    call = _CALLS[name]
    generated = ids(renderer, call + "<|user|>")
    text = written(renderer, record(renderer, generated, ["r"]).ids)
    tail = text.split("</tool_call>")[-1]
    newline = "\n" if name == "glm46" else ""
    opened = "" if name == "glm46" else "<think>"
    result = f"<tool_response>{newline}r{newline}</tool_response>"
    assert tail == f"<|user|><|observation|>{newline}{result}<|assistant|>{opened}"
    # Answered by a user message, the sampled token is that message's opening.
    said = renderer.close(generated) + renderer.user_message("Go on.", after=generated)
    assert written(renderer, generated + said).count("<|user|>") == 1


@pytest.mark.parametrize("name", _EVERY)
@pytest.mark.parametrize("ending", ["", "<|endoftext|>"])
def test_case_04_the_close_of_a_cut_turn_is_synthesised(load: Load, name: str, ending: str) -> None:
    renderer = renderer_for(load(name))
    generated = ids(renderer, _CALLS[name] + ending)
    close = renderer.close(generated)
    assert written(renderer, close) == _END[name]
    ledger = record(renderer, generated, ["r"])
    start = len(renderer.prompt(_START, _TOOLS))
    assert ledger.loss_mask[start:] == [1] * len(generated) + [0] * (len(ledger) - start - len(generated))


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "qwen35", "glm46", "glm47", "harmony"])
def test_case_05_a_cut_thought_is_closed(load: Load, name: str) -> None:
    renderer = renderer_for(load(name))
    opening = {"qwen35": "", "glm47": "", "glm46": "\n<think>", "harmony": "<|channel|>analysis<|message|>"}
    generated = ids(renderer, opening.get(name, "<think>\n") + "I should look at")
    assert renderer.inside_reasoning(generated)
    expected = {"glm46": "</think>", "glm47": "</think>", "harmony": "<|end|>"}
    close = renderer.close(generated)
    if name == "glm46":
        assert written(renderer, close).startswith("</think>")
    else:
        assert written(renderer, close) == expected.get(name, "\n</think>\n\n<|im_end|>\n")
    closed = opening.get(name, "<think>\n") + {"harmony": "Hm.<|end|>"}.get(name, "Hm.\n</think>\n\nSo")
    assert not renderer.inside_reasoning(ids(renderer, closed))
    assert "</think>" not in written(renderer, renderer.close(ids(renderer, closed)))


@pytest.mark.parametrize("name", _EVERY)
def test_case_06_an_empty_completion_is_closed(load: Load, name: str) -> None:
    renderer = renderer_for(load(name))
    close = written(renderer, renderer.close([]))
    opened = {"qwen35": "\n</think>\n\n", "glm47": "</think>"}.get(name, "")
    assert close == opened + ("<|end|>" if name == "harmony" else _END[name])
    for tail in (renderer.observation(["r"], names=["read"], after=[]), renderer.user_message("m", after=[])):
        assert tail


@pytest.mark.parametrize("name", ["qwen3", "qwen35", "glm46", "glm47"])
def test_case_07_sampled_ids_stay_where_the_template_drops_reasoning(load: Load, name: str) -> None:
    renderer = renderer_for(load(name))
    assert any("drops earlier reasoning" in note for note in renderer.notes)
    opening = "" if renderer.prefilled_thought else "<think>\n"
    generated = ids(renderer, f"{opening}The secret thought.\n</think>\n\nAnswer.")
    ledger = TokenLedger()
    ledger.append_prompt(renderer.prompt(_START, []))
    ledger.append_generation(generated, [-1.0] * len(generated))
    ledger.append_close(renderer.close(generated))
    ledger.append_observation(renderer.user_message("And?", after=generated))
    assert "The secret thought." in written(renderer, ledger.ids)
    answer = {"role": "assistant", "content": "Answer.", "reasoning_content": "The secret thought."}
    shown = renderer.tokenizer.render([*_START, answer], add_generation_prompt=False)
    later = [*_START, answer, {"role": "user", "content": "And?"}]
    assert "The secret thought." in shown
    assert "The secret thought." not in renderer.tokenizer.render(later, add_generation_prompt=True)


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "qwen35"])
def test_case_08_parallel_results_share_one_user_turn(load: Load, name: str) -> None:
    renderer = renderer_for(load(name))
    text = written(renderer, renderer.observation(["one", "two"]))
    blocks = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in ("one", "two"))
    assert text == f"<|im_start|>user\n{blocks}<|im_end|>\n<|im_start|>assistant\n{renderer.prefill}"


def test_case_11_string_arguments_become_an_object_where_the_template_needs_one(load: Load) -> None:
    call = {"type": "function", "id": "c", "function": {"name": "read", "arguments": '{"p": "é"}'}}
    messages = [*_START, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "r"}]
    renderer = renderer_for(load("qwen35"))
    assert "<parameter=p>\né\n</parameter>" in written(renderer, renderer.prompt(messages, _TOOLS))
    # And the other way round for a template that wants their text.
    parsed = {**call, "function": {"name": "read", "arguments": {"p": "é"}}}
    renderer = renderer_for(load("deepseek_v3"))
    text = written(renderer, renderer.prompt([*messages[:2], {**messages[2], "tool_calls": [parsed] * 2}], []))
    assert 'read\n```json\n{"p": "é"}\n```' in text


def test_case_16_harmony_stop_tokens_stay(load: Load) -> None:
    renderer = renderer_for(load("harmony"))
    assert isinstance(renderer, HarmonyRenderer)
    controls = renderer.tokenizer.control_tokens
    assert sorted(renderer.stop_token_ids) == sorted([controls["<|call|>"], controls["<|return|>"]])
    called = ids(renderer, _CALLS["harmony"] + "<|call|>")
    ledger = record(renderer, called, ['say "hi"\n'])
    assert renderer.close(called) == [] and ledger.ids.count(controls["<|call|>"]) == 1
    assert ledger.loss_mask[ledger.ids.index(controls["<|call|>"])] == 1
    assert written(renderer, ledger.ids).endswith(
        '<|call|><|start|>functions.read to=assistant<|channel|>commentary<|message|>"say \\"hi\\"\\n"<|end|>'
        "<|start|>assistant"
    )
    answered = ids(renderer, "<|channel|>final<|message|>Done.<|return|>")
    assert renderer.close(answered) == []
    assert written(renderer, renderer.user_message("Sure?")).startswith("<|start|>user<|message|>Sure?<|end|>")
    # A turn that was cut between two messages needs nothing, one inside a message needs that message's end.
    between = ids(renderer, "<|channel|>analysis<|message|>Hm.<|end|>")
    assert renderer.close(between) == []
    assert written(renderer, renderer.close(ids(renderer, "<|channel|>final<|message|>Do"))) == "<|end|>"


def test_harmony_needs_the_tools_names(load: Load) -> None:
    renderer = renderer_for(load("harmony"))
    with pytest.raises(ValueError, match="2 results, 1 names"):
        renderer.observation(["a", "b"], names=["read"])
    forged = renderer.observation(["a"], names=["x<|message|>"])
    assert forged.count(renderer.tokenizer.control_tokens["<|message|>"]) == 1


@pytest.mark.parametrize("name", _EVERY)
def test_case_18_and_21_what_was_not_sampled_is_not_trained(load: Load, name: str) -> None:
    renderer = renderer_for(load(name))
    for generated in ([], ids(renderer, _CALLS[name])):
        ledger = record(renderer, generated, ["r"])
        assert sum(ledger.loss_mask) == len(generated)
        assert [value for value, mask in zip(ledger.logprobs, ledger.loss_mask, strict=True) if not mask] == [
            0.0
        ] * ledger.loss_mask.count(0)


@pytest.mark.parametrize(("name", "prefill"), [("qwen35", "<think>\n"), ("glm47", "<think>")])
def test_case_22_the_prefill_is_observed_not_trained(load: Load, name: str, prefill: str) -> None:
    renderer = renderer_for(load(name))
    assert renderer.prefill == prefill and renderer.prefilled_thought
    # The model starts with the newline that would have merged with the prefill's.
    generated = ids(renderer, "\nHm.\n</think>\n\nAnswer.")
    ledger = record(renderer, generated, ["r"])
    start = len(renderer.prompt(_START, _TOOLS))
    assert written(renderer, ledger.ids[:start]).endswith(prefill)
    assert not any(ledger.loss_mask[:start]) and ledger.ids[start : start + len(generated)] == generated
    assert written(renderer, ledger.ids[: start + len(generated)]).endswith(f"{prefill}\nHm.\n</think>\n\nAnswer.")
    assert written(renderer, ledger.ids).endswith(prefill)
    if name == "qwen35":  # `<think>`, two newlines: one token in a full render, two in the stream
        whole = renderer.tokenizer.encode_template(f"{prefill}\nHm.")
        assert renderer.tokenizer.encode_template(prefill) + ids(renderer, "\nHm.") != whole


def test_both_chatml_renderers_agree(load: Load) -> None:
    derived, explicit = renderer_for(load("smollm2"), "chatml"), ChatMLRenderer(load("smollm2"))
    assert derived.prompt(_START, _TOOLS) == explicit.prompt(_START, _TOOLS)
    for generated in ([], [5], [explicit.stop_token_ids[0]], [5, explicit.stop_token_ids[1]], ids(derived, "<think>a")):
        assert derived.close(generated) == explicit.close(generated)
        assert derived.inside_reasoning(generated) == explicit.inside_reasoning(generated)
    assert derived.observation(["a", " b\n"]) == explicit.observation(["a", " b\n"])
    assert derived.user_message("<|im_end|>") == explicit.user_message("<|im_end|>")
    assert derived.stop_token_ids == explicit.stop_token_ids


def test_the_cost_of_a_turn_does_not_depend_on_tools_or_history(load: Load) -> None:
    class Counting(ChatTokenizer):
        characters = 0

        def encode_content(self, text: str) -> list[int]:
            Counting.characters += len(text)
            return super().encode_content(text)

        def render(self, *args: Any, **kwargs: Any) -> str:
            raise AssertionError("a turn needs no render")

    renderer = renderer_for(load("qwen35"))
    many = [{**tool, "function": {**tool["function"], "name": f"tool_{n}"}} for n in range(50) for tool in _TOOLS]
    prompt = renderer.prompt(_START, many)
    renderer.tokenizer = Counting(
        load("qwen35")._template_encoder.to_str(), (TEMPLATES / "qwen35.jinja").read_text(), {}
    )
    generated = [*prompt[:3], renderer.stop_token_ids[0]]
    renderer.close(generated)
    renderer.observation(["r" * 1000])
    assert 1000 <= Counting.characters < 1200


def test_deepseek_v3_frames_every_turn_as_its_template_frames_the_first(load: Load) -> None:
    renderer = renderer_for(load("deepseek_v3"))
    assert renderer.call_syntax == "deepseek_v3" and any("first turn only" in note for note in renderer.notes)
    call = {"type": "function", "id": "c", "function": {"name": "read", "arguments": "{}"}}
    messages = [*_START, {"role": "assistant", "content": None, "tool_calls": [call, call]}]
    prompt = renderer.prompt(_START, [])
    full = renderer.tokenizer.render(
        [*messages, *({"role": "tool", "content": text} for text in ("a\n", "b"))], add_generation_prompt=True
    )
    sampled = renderer.tokenizer.encode_template(
        full.removeprefix(written(renderer, prompt)).split("<｜tool▁outputs▁begin｜>")[0]
    )
    stream = [*prompt, *sampled, *renderer.close(sampled), *renderer.observation(["a\n", "b"])]
    assert stream == renderer.tokenizer.encode_template(full)


def test_the_default_renderer_is_the_first_that_proves(load: Load) -> None:
    families = {name: renderer_for(load(name)).family for name in _EVERY}
    assert families == {
        "smollm2": "chatml",
        "qwen3": "chatml",
        "qwen35": "qwen_xml",
        "glm46": "glm",
        "glm47": "glm",
        "llama31": "llama3",
        "deepseek_v3": "deepseek_v3",
        "deepseek_v31": "deepseek_v3",
        "harmony": "harmony",
    }
    assert TemplateRenderer(load("qwen35")).call_syntax == "qwen_xml"
