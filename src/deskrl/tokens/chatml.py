"""The ChatML renderer, under the name it has had from the start; it lives in `renderers.chatml`."""

from deskrl.tokens.renderers.base import RendererError
from deskrl.tokens.renderers.chatml import IM_END, IM_START, ChatMLRenderer
from deskrl.tokens.renderers.preamble import TOOL_POSTAMBLE, TOOL_PREAMBLE

__all__ = ["IM_END", "IM_START", "TOOL_POSTAMBLE", "TOOL_PREAMBLE", "ChatMLRenderer", "RendererError"]
