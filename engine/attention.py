"""Paged attention as transformers' models call it.

The models run with `attn_implementation=NAME` and get the step's `PagedBatch` as keyword
argument `paged`, which their code hands through to here. Each call first stores the keys and
values of the step's rows in their pages, then attends over the pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from engine import paged_reference
from engine.paged_batch import GroupedBatch, PagedBatch

__all__ = ["NAME", "PagedBatch", "overwinter_paged_attention", "register"]

NAME = "overwinter_paged"

# What transformers' models hand through that has done its work elsewhere: positions are in the
# rotary embedding by now, and every row's position also follows from the batch.
_SPENT = frozenset({"position_ids", "cache_position"})
# Harmless only while they are off.
_OFF = frozenset({"use_cache", "output_attentions", "output_hidden_states", "output_router_logits"})


def overwinter_paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged: PagedBatch | GroupedBatch,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Store the rows' keys and values, then attend causally over the pages.

    `query` [1, H, T, D], `key` and `value` [1, Hkv, T, D], all of the pool's dtype; returns
    ([1, T, H, D], None). Row i of sequence s stands at p = context_len[s] - rows + i and sees
    positions [max(0, p - sliding_window + 1), p].

    Raises TypeError for a keyword argument whose meaning is not implemented, ValueError for
    shapes that do not fit the pool or attention that is not plain causal.
    """
    refuse_unknown(kwargs, attention_mask)
    if dropout != 0.0:
        raise ValueError(f"{NAME} attention has no dropout; the model must be in eval mode")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ValueError(f"{NAME} attention is causal; {type(module).__name__} is not")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, not {sliding_window}")
    batch, layer = paged.at(module.layer_idx)  # type: ignore[arg-type]
    _check_shapes(query, key, value, batch)
    check_window(batch, module.layer_idx, sliding_window)
    kernels = batch.kernels
    if kernels is None or batch.kv.device.type != "cpu":
        paged_reference.write_kv(key, value, batch, layer)
        out = paged_reference.attend(
            query, batch, layer, scaling=scaling, window=sliding_window, softcap=softcap
        )
        return out, None
    kernels.write_kv(key, value, batch, layer)
    out = kernels.attend(
        query, batch, layer, scaling=scaling, window=sliding_window, softcap=softcap
    )
    return out, None


def refuse_unknown(arguments: Mapping[str, Any], attention_mask: torch.Tensor | None) -> None:
    """Raises TypeError for an argument whose meaning is not implemented, ValueError for a mask."""
    for name, given in arguments.items():
        if given is None or name in _SPENT or (name in _OFF and given is False):
            continue
        raise TypeError(f"{NAME} attention does not implement the argument {name!r}")
    if attention_mask is not None:
        raise ValueError(f"{NAME} attention builds its own mask; attention_mask must be None")


def check_window(batch: PagedBatch, layer: Any, sliding_window: int | None) -> None:
    """Raises ValueError where the layer looks back further than its KV is kept."""
    if batch.window is not None and (sliding_window is None or sliding_window > batch.window):
        raise ValueError(
            f"layer {layer} looks back {sliding_window or 'to the beginning'}, but its"
            f" KV is kept for {batch.window} tokens"
        )


def _check_shapes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, paged: PagedBatch
) -> None:
    layout = paged.kv.layout
    rows = (1, layout.num_kv_heads, paged.num_rows, layout.head_dim)
    if key.shape != rows or value.shape != rows:
        raise ValueError(
            f"keys {list(key.shape)} and values {list(value.shape)} must be {list(rows)}"
        )
    num_heads = query.shape[1]
    if query.shape != (1, num_heads, *rows[2:]) or num_heads % layout.num_kv_heads:
        raise ValueError(f"a query of {list(query.shape)} does not fit keys of {list(rows)}")
    for tensor in (query, key, value):
        if tensor.dtype != paged.kv.dtype:
            raise TypeError(f"attention in {tensor.dtype} over a pool of {paged.kv.dtype}")


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The mask follows from the batch: transformers need not build one."""


def register() -> None:
    """Make `attn_implementation=NAME` known to transformers; calling it again changes nothing."""
    AttentionInterface.register(NAME, overwinter_paged_attention)
    AttentionMaskInterface.register(NAME, _no_mask)
