"""The packed rows of one step and where their keys and values live."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from engine.kernels import Kernels
from engine.kv_cache import KVCache


@dataclass
class PagedBatch:
    """T packed tokens over S sequences; built once a step, passed to the model as `paged=`.

    Sequence s owns rows [query_start[s], query_start[s + 1]), the last of its `context_len[s]`
    tokens. Position p of sequence s lives in block `block_tables[s, p // block_size]`; entries
    behind the context are never read. Raises ValueError for a batch that would reach outside
    the pool or is malformed, TypeError for a tensor of another dtype.
    """

    query_start: torch.Tensor  # int32 [S + 1], host
    context_len: torch.Tensor  # int32 [S], host; tokens visible to the last row
    block_tables: torch.Tensor  # int32 [S, max_blocks], host
    slot_mapping: torch.Tensor  # int64 [T], host; block_id * block_size + offset of each row
    kv: KVCache
    kernels: Kernels | None = None  # None: the plain reference
    # Host copies that the reference loops over.
    starts: list[int] = field(init=False, repr=False)
    contexts: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, dtype, dims in (
            ("query_start", torch.int32, 1),
            ("context_len", torch.int32, 1),
            ("block_tables", torch.int32, 2),
            ("slot_mapping", torch.int64, 1),
        ):
            tensor = getattr(self, name)
            if tensor.dtype != dtype or tensor.device.type != "cpu":
                raise TypeError(f"{name} must be {dtype} on the CPU, not {tensor.dtype}")
            if tensor.dim() != dims:
                raise ValueError(f"{name} must have {dims} dimensions, not {tensor.dim()}")
            setattr(self, name, tensor.contiguous())
        self.starts = self.query_start.tolist()
        self.contexts = self.context_len.tolist()
        self._check()

    @property
    def num_rows(self) -> int:
        """T, the packed tokens of this step."""
        return self.starts[-1]

    def _check(self) -> None:
        """Once a step, so that no layer's kernel can read or write outside the pool."""
        starts, contexts = self.query_start.numpy(), self.context_len.numpy()
        tables, slots = self.block_tables.numpy(), self.slot_mapping.numpy()
        block_size, num_blocks = self.kv.layout.block_size, self.kv.num_blocks
        if len(starts) != len(contexts) + 1 or len(tables) != len(contexts):
            raise ValueError("query_start, context_len and block_tables disagree on the sequences")
        rows = np.diff(starts)
        if starts[0] != 0 or starts[-1] != len(slots) or (rows < 0).any():
            raise ValueError("query_start must rise from 0 to the number of rows")
        if (contexts < rows).any():
            raise ValueError("context_len must count the rows of this step")
        used = -(-contexts // block_size)
        if used.max(initial=0) > tables.shape[1]:
            raise ValueError("block_tables are narrower than the longest context")
        read = np.arange(tables.shape[1]) < used[:, None]
        if (((tables < 0) | (tables >= num_blocks)) & read).any():
            raise ValueError(f"block_tables name a block outside a pool of {num_blocks}")
        if ((slots < 0) | (slots >= num_blocks * block_size)).any():
            raise ValueError(f"slot_mapping names a slot outside a pool of {num_blocks} blocks")
