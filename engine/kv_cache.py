"""The KV pool: equal blocks in one allocation, bytes to offload and tensors to attention."""

from __future__ import annotations

import mmap

import torch

from engine.errors import StartupError
from engine.kv_layout import KVLayout


class KVCache:
    """`num_blocks` KV blocks, block-major: `pool` is uint8 [num_blocks, layout.block_bytes].

    On the CPU the pool is mapped, not filled: a block costs memory from its first write on.
    Raises StartupError if the memory cannot be had.
    """

    def __init__(
        self, num_blocks: int, layout: KVLayout, device: torch.device | str = "cpu"
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"a KV pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.layout = layout
        self.device = torch.device(device)
        self.dtype: torch.dtype = getattr(torch, layout.dtype)
        num_bytes = num_blocks * layout.block_bytes
        try:
            if self.device.type == "cpu":
                # Private, not Python's default of shared: shared pages count as tmpfs and are
                # kept from the kernel's huge pages.
                memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                flat = torch.frombuffer(memory, dtype=torch.uint8)
            else:
                flat = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        except (OSError, ValueError, OverflowError, RuntimeError) as error:
            raise StartupError(
                f"cannot allocate a KV pool of {num_bytes / (1 << 30):.1f} GiB "
                f"({num_blocks} blocks): {error}; ask for less with --kv-memory"
            ) from error
        self.pool = flat.view(num_blocks, layout.block_bytes)
        # [num_blocks, layer, key or value, head, token, dim]
        self._pages = self.pool.view(self.dtype).view(
            num_blocks,
            layout.num_layers,
            2,
            layout.num_kv_heads,
            layout.block_size,
            layout.head_dim,
        )
        # Every step asks for every layer: the views are made once.
        self._keys = [self._pages[:, layer, 0] for layer in range(layout.num_layers)]
        self._values = [self._pages[:, layer, 1] for layer in range(layout.num_layers)]

    def key(self, layer: int) -> torch.Tensor:
        """Keys of one layer: a strided view [num_blocks, num_kv_heads, block_size, head_dim]."""
        return self._keys[layer]

    def value(self, layer: int) -> torch.Tensor:
        """Values of one layer: a strided view [num_blocks, num_kv_heads, block_size, head_dim]."""
        return self._values[layer]

    def planes(self, block_id: int, num_layers: int) -> torch.Tensor:
        """A block's first layers: float32 [num_layers, key or value, head, token, head_dim]."""
        return self._pages[block_id, :num_layers].float()
