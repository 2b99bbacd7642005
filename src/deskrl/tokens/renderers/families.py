"""What a chat template does not say about a model family: its stop tokens and which of them end a turn."""

from __future__ import annotations

from dataclasses import dataclass

from deskrl.tokens.renderers.reasoning import THINK, ReasoningTags


@dataclass(frozen=True)
class Family:
    """Facts about a family; everything else is derived from the template and proved on it.

    Args:
        call_syntaxes: parser families whose calls its templates teach; none: any.
        needs: control tokens by which the family is known; without them the model is of another.
        ends: tokens that end a turn besides the one that the template writes.
        stops: tokens at which the engine must stop besides those that end a turn.
        template_end_stops: whether the token that the template writes after an answer ends a sampled turn too.
            gpt-oss ends every message with `<|end|>`, its turns with `<|return|>` or `<|call|>`.
    """

    name: str
    call_syntaxes: tuple[str, ...]
    needs: tuple[str, ...]
    ends: tuple[str, ...] = ()
    stops: tuple[str, ...] = ("<|endoftext|>",)
    template_end_stops: bool = True
    reasoning: ReasoningTags = THINK


GENERIC = Family("generic", (), ())
CHATML = Family("chatml", ("hermes",), ("<|im_start|>", "<|im_end|>"))
QWEN_XML = Family("qwen_xml", ("qwen_xml",), ("<|im_start|>", "<|im_end|>"))
GLM = Family("glm", ("glm",), ("<|user|>", "<|assistant|>", "<|observation|>"))
LLAMA3 = Family(
    "llama3",
    ("llama3",),
    ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ends=("<|eom_id|>",),
    stops=("<|end_of_text|>",),
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    ("deepseek_v3", "deepseek_v31"),
    ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>"),
)
HARMONY = Family(
    "harmony",
    ("harmony",),
    ("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>"),
    ends=("<|call|>", "<|return|>"),
    stops=(),
    template_end_stops=False,
)

FAMILIES: dict[str, Family] = {
    family.name: family for family in (CHATML, QWEN_XML, GLM, LLAMA3, DEEPSEEK_V3, HARMONY, GENERIC)
}
