"""How far two KV blocks that should hold the same are apart, slot by slot.

The figure is the largest over layers, keys and values, heads and slots, never an average: one bad
slot of sixteen drowns in the average of a block. A slot's error is |a - b| over the head's
`head_dim` elements, as a share of its own length or of the head's usual one in that block,
whichever is more, because a token that attention ignores has values near zero and noise of the
usual size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kv_cache import KVCache
from engine.step import BlockPair, Comparison, SlotError

_TINY = torch.finfo(torch.float32).tiny


def compare(kv: KVCache, layers: Sequence[int], pair: BlockPair) -> Comparison:
    """`layers`: those of the pair's group, in the order in which a block holds them."""
    found, computed = (kv.planes(block, len(layers)) for block in (pair.block_id, pair.computed_id))
    errors = slot_errors(found, computed)
    worst = int(errors.argmax())
    place, part, head, slot = map(int, torch.unravel_index(torch.tensor(worst), errors.shape))
    return Comparison(
        SlotError(
            errors.flatten()[worst].item(), layers[place], ("key", "value")[part], head, slot
        ),
        digest=_digest(kv, pair.block_id),
        computed_digest=_digest(kv, pair.computed_id),
    )


def slot_errors(found: Tensor, computed: Tensor) -> Tensor:
    """Of planes [layer, key or value, head, slot, dim]: float32 [layer, part, head, slot]."""
    difference = (found - computed).norm(dim=-1)
    length = torch.nan_to_num(computed.norm(dim=-1), posinf=0.0)  # lest it hide where it is
    usual = length.square().mean(dim=-1, keepdim=True).sqrt()
    errors = difference / torch.maximum(length, usual).clamp_min(_TINY)
    return torch.nan_to_num(errors, nan=torch.inf, posinf=torch.inf)


def _digest(kv: KVCache, block_id: int) -> str:
    return hashlib.sha256(kv.pool[block_id].cpu().numpy().tobytes()).hexdigest()
