"""Key/value memory of the embedded engine: one row per running sequence, plus a prefix cache.

`KVRows` holds, per layer, one buffer of shape (rows, kv_heads, max_len, head_dim). Row i's tokens sit at
positions 0..len-1, so rows [0, n) are one contiguous view and a batched step copies nothing: it writes
each row's new keys in place and attends over the view under a mask. Memory is touched, and so paid for,
only as far as sequences really reach.

`PrefixCache` keeps copies of finished sequences' keys and values, so that the next turn of a conversation
computes only what is new. It is least-recently-used and bounded by bytes.

Invariant: an entry of the prefix cache was computed whole under the current weights; whoever changes the
weights calls `clear`.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache

ATTENTION = "deskrl_rows"
"""The name under which `rows_attention` is known to transformers."""


def rows_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Grouped-query attention that never repeats keys; transformers' attention signature.

    query (n, heads, t, d), key and value (n, kv_heads, s, d), boolean mask (n, 1, t, s). The query heads
    that share a key head become extra query rows, which torch's fused CPU kernel takes as they are.
    """
    n, heads, t, d = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    if attention_mask is None:
        raise ValueError("rows_attention needs an explicit mask")
    mask = attention_mask if t == 1 else attention_mask.repeat(1, 1, groups, 1)
    out = scaled_dot_product_attention(
        query.reshape(n, kv_heads, groups * t, d), key, value, attn_mask=mask, scale=scaling
    )
    return out.reshape(n, heads, t, d).transpose(1, 2), None


AttentionInterface.register(ATTENTION, rows_attention)


class KVRows(Cache):
    """The rows; handed to the model as its `past_key_values` after `place` said where a step writes."""

    def __init__(self, config: Any, rows: int, max_len: int, dtype: torch.dtype) -> None:
        super().__init__(layers=[])
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, rows, config.num_key_value_heads, max_len, head_dim)
        # numpy's zeros are untouched pages of the kernel: zero without costing memory. They must be zero,
        # not just masked: attention multiplies masked values by 0, and 0 * NaN is NaN.
        size = math.prod(shape) * dtype.itemsize
        self.data = torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
        self._rows: slice = slice(0, 0)
        self._positions = torch.zeros(0, 0, dtype=torch.long)
        self._length = 0

    def place(self, first: int, positions: torch.Tensor) -> torch.Tensor:
        """The next step feeds rows first..first+n-1 at `positions` (n, t); returns the mask (n, 1, t, s)."""
        self._rows = slice(first, first + positions.shape[0])
        self._positions = positions
        self._length = int(positions.max()) + 1
        return (torch.arange(self._length) <= positions[:, :, None])[:, None]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new keys and values (n, kv_heads, t, d); return views over all positions so far."""
        key, value = self.data[layer_idx, 0, self._rows], self.data[layer_idx, 1, self._rows]
        n, t = self._positions.shape
        if n == 1:
            start = int(self._positions[0, 0])
            key[:, :, start : start + t] = key_states
            value[:, :, start : start + t] = value_states
        else:
            index = self._positions[:, None, :, None].expand(key_states.shape)
            key.scatter_(2, index, key_states)
            value.scatter_(2, index, value_states)
        # Positions past a short row's own end hold zeros or an earlier tenant's values: both are masked.
        return key[:, :, : self._length], value[:, :, : self._length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Only transformers asks; positions are always given explicitly."""
        return 0

    def read(self, row: int, length: int) -> torch.Tensor:
        """A copy of a row's first `length` tokens: (layers, 2, kv_heads, length, head_dim)."""
        return self.data[:, :, row, :, :length].clone()

    def write(self, row: int, kv: torch.Tensor, length: int) -> None:
        """Put the first `length` tokens of a copy made by `read` into a row."""
        self.data[:, :, row, :, :length] = kv[..., :length, :]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row's first `length` tokens onto another row."""
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading token ids two int arrays share."""
    n = min(len(a), len(b))
    different = np.nonzero(a[:n] != b[:n])[0]
    return int(different[0]) if len(different) else n


@dataclass(frozen=True)
class _Entry:
    ids: np.ndarray
    kv: torch.Tensor


class PrefixCache:
    """Keys and values of past sequences by token ids; the caller's scheduler thread is its only user."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._next = 0

    def find(self, ids: np.ndarray) -> tuple[int, torch.Tensor | None]:
        """The longest stored prefix of `ids`: its length in tokens (0: none) and the copy that holds it."""
        best, best_key = 0, -1
        for key, entry in self._entries.items():
            if (shared := common_prefix(entry.ids, ids)) > best:
                best, best_key = shared, key
        if best == 0:
            return 0, None
        self._entries.move_to_end(best_key)
        return best, self._entries[best_key].kv

    def put(self, ids: np.ndarray, kv: torch.Tensor) -> None:
        """Store a sequence; entries it extends are dropped, then the least recently used ones."""
        size = kv.numel() * kv.element_size()
        if size > self.max_bytes:
            return
        for key in [k for k, e in self._entries.items() if common_prefix(e.ids, ids) == len(e.ids)]:
            self._drop(key)
        while self._entries and self.bytes + size > self.max_bytes:
            self._drop(next(iter(self._entries)))
        self._entries[self._next] = _Entry(ids, kv)
        self._next += 1
        self.bytes += size

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self.bytes = 0

    def _drop(self, key: int) -> None:
        kv = self._entries.pop(key).kv
        self.bytes -= kv.numel() * kv.element_size()
