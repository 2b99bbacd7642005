"""The model of the embedded engine: load, one forward step, sample, swap weights.

Sampled tokens' log-probabilities are those of the whole vocabulary's distribution at the request's
temperature (at temperature 0: at temperature 1), whatever top-k or top-p cut away; that is what SkyRL's
trainer computes for the same token, so the two can be compared.

Not thread-safe: the scheduler's thread is the only caller.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deskrl.training.cpu.kv import ATTENTION, KVRows


class UnsupportedModelError(Exception):
    """The model has layers that a plain key/value cache cannot serve, or the weights do not fit it."""


@dataclass(frozen=True)
class Sampling:
    """How one request samples. `max_tokens` and `min_tokens` count sampled tokens, eos included."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: frozenset[int] = field(default_factory=frozenset)


@dataclass(frozen=True)
class Draw:
    """One row's part in a sampling step: its request, how much it has said, and its random stream."""

    sampling: Sampling
    sampled: int
    stream: random.Random


def default_dtype() -> torch.dtype:
    """bfloat16 where the CPU multiplies it natively, else float32, which is then several times faster."""
    native = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if native else torch.float32


class Runner:
    """A causal language model over `rows` key/value rows of `max_len` tokens each."""

    def __init__(
        self, model: str, rows: int, max_len: int, threads: int | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """`threads=None` leaves torch's own number, `dtype=None` takes `default_dtype`."""
        from transformers import AutoModelForCausalLM

        if threads is not None:
            torch.set_num_threads(threads)
        auto: Any = AutoModelForCausalLM
        self.model = auto.from_pretrained(model, dtype=dtype or default_dtype(), attn_implementation=ATTENTION)
        self.model.eval()
        config = self.model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise UnsupportedModelError(f"the embedded engine serves full attention only, not {sorted(kinds)}")
        if max_len > config.max_position_embeddings:
            raise UnsupportedModelError(
                f"--max-model-len {max_len} is over the model's {config.max_position_embeddings} positions"
            )
        self.vocab_size: int = config.vocab_size
        self.kv = KVRows(config, rows, max_len, self.model.dtype)

    @torch.inference_mode()
    def forward(self, first_row: int, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Feed `ids` at `positions` (both (n, t)) to rows first_row..; returns float32 logits (n, vocab)."""
        mask = self.kv.place(first_row, positions)
        out = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.kv,
            use_cache=True,
            logits_to_keep=1,
        )
        return torch.Tensor(out.logits[:, -1].float())

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, draws: list[Draw]) -> tuple[list[int], list[float]]:
        """Draw a token per row of `logits` (n, vocab); returns the ids and their log-probabilities."""
        for row, draw in enumerate(draws):
            if draw.sampled < draw.sampling.min_tokens and draw.sampling.stop_ids:
                logits[row, list(draw.sampling.stop_ids)] = -torch.inf
        temperature = torch.tensor([d.sampling.temperature or 1.0 for d in draws])[:, None]
        logprobs = torch.log_softmax(logits / temperature, -1)
        tokens = logits.argmax(-1)
        rows = [i for i, d in enumerate(draws) if d.sampling.temperature > 0]
        if rows:
            probs = logprobs[rows].exp()
            for i, row in enumerate(rows):
                _truncate(probs[i], draws[row].sampling)
            # Inverse transform, one uniform per row: a seeded request draws the same whatever runs beside it.
            cumulative = probs.double().cumsum(-1)
            uniform = torch.tensor([draws[row].stream.random() for row in rows], dtype=torch.double)
            threshold = uniform[:, None] * cumulative[:, -1:]
            drawn = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
            tokens[rows] = drawn.clamp_max(logits.shape[-1] - 1)
        return tokens.tolist(), logprobs.gather(-1, tokens[:, None])[:, 0].tolist()

    @torch.no_grad()
    def load_weights(self, folder: Path) -> None:
        """Replace all weights by those of `folder`/*.safetensors (float dtypes are converted in the copy).

        Raises UnsupportedModelError, and changes nothing, unless names and shapes match the model; only
        a tied head may be absent.
        """
        from safetensors.torch import load_file

        files = sorted(folder.glob("*.safetensors"))
        new: dict[str, torch.Tensor] = {}
        for file in files:
            new.update(load_file(file))
        current: dict[str, Any] = self.model.state_dict()
        tied = set(getattr(self.model, "all_tied_weights_keys", {}))
        missing = current.keys() - new.keys() - tied
        unknown = new.keys() - current.keys()
        shapes = [k for k in new.keys() & current.keys() if new[k].shape != current[k].shape]
        if missing or unknown or shapes:
            raise UnsupportedModelError(
                f"weights in {folder} do not fit: missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}, "
                f"other shapes {sorted(shapes)[:3]}"
            )
        for name, tensor in new.items():
            if name not in tied:
                current[name].copy_(tensor)


def _truncate(probs: torch.Tensor, sampling: Sampling) -> None:
    """Zero, in place, what top-k and then top-p cut from one row (vocab,) of probabilities."""
    if 0 < sampling.top_k < len(probs):
        probs[probs < probs.topk(sampling.top_k).values[-1]] = 0
    if sampling.top_p < 1:
        ordered, order = probs.sort(descending=True)
        ordered = ordered / ordered.sum()
        # Keep the smallest set that reaches top_p: a token goes if those before it already do.
        probs[order[ordered.cumsum(0) - ordered >= sampling.top_p]] = 0
