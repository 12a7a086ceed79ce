"""Paged attention in plain torch: what the kernel is tested against, and the way without one.

Each sequence's pages are gathered, only those that its rows can see, and attended in float32.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from engine.paged_batch import PagedBatch


def write_kv(key: torch.Tensor, value: torch.Tensor, batch: PagedBatch, layer: int) -> None:
    """Store each row's key and value in its slot. `key`, `value`: [1, Hkv, T, D]."""
    slots = batch.slot_mapping.to(key.device)
    block_size = batch.kv.layout.block_size
    blocks, offsets = slots // block_size, slots % block_size
    dtype = batch.kv.dtype
    batch.kv.key(layer)[blocks, :, offsets] = key[0].transpose(0, 1).to(dtype)
    batch.kv.value(layer)[blocks, :, offsets] = value[0].transpose(0, 1).to(dtype)


def attend(
    query: torch.Tensor,
    batch: PagedBatch,
    layer: int,
    *,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Causal attention of `query` [1, H, T, D] over the pages; returns [1, T, H, D].

    Row i of sequence s stands at position p = context_len[s] - rows + i and sees
    [max(0, p - window + 1), p]; `window` None sees all of [0, p].
    """
    _, num_heads, num_rows, head_dim = query.shape
    out = query.new_empty(1, num_rows, num_heads, head_dim)
    for index, context in enumerate(batch.contexts):
        first_row, end_row = batch.starts[index], batch.starts[index + 1]
        rows = end_row - first_row
        if rows == 0:
            continue
        first_position = context - rows
        seen_from = 0 if window is None else max(0, first_position - window + 1)
        keys, values = _gather(batch, layer, index, seen_from, context)
        positions = torch.arange(first_position, context, device=query.device)[:, None]
        seen = torch.arange(seen_from, context, device=query.device)[None, :]
        visible = seen <= positions
        if window is not None:
            visible &= seen > positions - window
        # The query heads of one group share a key head: as further rows of it, nothing is repeated.
        num_groups = keys.shape[0]
        group = num_heads // num_groups
        packed = query[0, :, first_row:end_row].float().reshape(num_groups, group * rows, head_dim)
        mask = visible.repeat(group, 1)
        result = _softmax_values(packed, keys, values, mask, scaling, softcap)
        unpacked = result.view(num_heads, rows, head_dim).transpose(0, 1)
        out[0, first_row:end_row] = unpacked.to(query.dtype)
    return out


def _gather(
    batch: PagedBatch, layer: int, index: int, start: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of positions [start, end) of one sequence: float32 [Hkv, end - start, D]."""
    block_size = batch.kv.layout.block_size
    first_block = start // block_size
    blocks = batch.block_tables[index, first_block : -(-end // block_size)].long()
    blocks = blocks.to(batch.kv.device)
    skip = start - first_block * block_size
    gathered = []
    for pages in (batch.kv.key(layer), batch.kv.value(layer)):
        flat = pages[blocks].transpose(0, 1).flatten(1, 2)
        gathered.append(flat[:, skip : skip + end - start].float())
    return gathered[0], gathered[1]


def _softmax_values(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    if softcap is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    scores = query @ keys.transpose(1, 2) * scaling
    scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~mask, float("-inf")).softmax(dim=-1) @ values
