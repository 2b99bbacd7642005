"""Turn renderers: the ids around sampled turns, derived from a model's own chat template and proved on it."""

from deskrl.tokens.renderers.base import RendererError, TurnRenderer
from deskrl.tokens.renderers.chatml import ChatMLRenderer
from deskrl.tokens.renderers.families import FAMILIES, Family
from deskrl.tokens.renderers.generic import TemplateRenderer
from deskrl.tokens.renderers.select import renderer_for

__all__ = ["FAMILIES", "ChatMLRenderer", "Family", "RendererError", "TemplateRenderer", "TurnRenderer", "renderer_for"]
