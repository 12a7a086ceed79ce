"""Where each key and value of a KV block lies: plain arithmetic, free of torch.

One block is one contiguous run of bytes, so that a save or load is one copy and one read or write:

    block   = layer 0 | layer 1 | ... | layer L-1
    layer   = keys | values
    keys    = head 0 | head 1 | ...          values likewise
    head    = token 0 | token 1 | ...        `head_dim` elements each
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.kv_groups import KVGroup
from engine.model_info import ModelInfo

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one KV block. Raises ValueError for a size below one or an unknown dtype."""

    num_layers: int
    num_kv_heads: int
    head_dim: int  # elements
    block_size: int  # tokens
    dtype: str  # a key of ITEM_BYTES

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"KV dtype {self.dtype!r} is none of {', '.join(ITEM_BYTES)}")
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    @classmethod
    def of_model(cls, info: ModelInfo, groups: Sequence[KVGroup], block_size: int) -> KVLayout:
        """A block holds as many layers as the largest of the model's `groups` has."""
        return cls(
            num_layers=max(len(group.layers) for group in groups),
            num_kv_heads=info.num_kv_heads,
            head_dim=info.head_dim,
            block_size=block_size,
            dtype=info.dtype,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers, keys and values."""
        return self.num_layers * 2 * self.plane_elements * ITEM_BYTES[self.dtype]

    @property
    def plane_elements(self) -> int:
        """Elements of one block's keys (or values) of one layer."""
        return self.num_kv_heads * self.block_size * self.head_dim

    @property
    def token_bytes(self) -> int:
        """Bytes that one token adds, all layers, keys and values."""
        return self.block_bytes // self.block_size
