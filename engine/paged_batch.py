"""The packed rows of one step and where their keys and values live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.kernels import Kernels
from engine.kv_cache import KVCache


@dataclass
class PagedBatch:
    """T packed tokens over S sequences, as the layers of one KV group see them.

    Sequence s owns rows [query_start[s], query_start[s + 1]), the last of its `context_len[s]`
    tokens. Position p of sequence s lives in block `block_tables[s, p // block_size]`; entries
    behind the context, or before what its first row's window reaches, are never read. Raises
    ValueError for a batch that would reach outside the pool or is malformed, TypeError for a
    tensor of another dtype.
    """

    query_start: torch.Tensor  # int32 [S + 1], host
    context_len: torch.Tensor  # int32 [S], host; tokens visible to the last row
    block_tables: torch.Tensor  # int32 [S, max_blocks], host
    slot_mapping: torch.Tensor  # int64 [T], host; block_id * block_size + offset of each row
    kv: KVCache
    kernels: Kernels | None = None  # None: the plain reference
    window: int | None = None  # of every layer that reads through this batch; None: full attention
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

    def at(self, layer: int) -> tuple[PagedBatch, int]:
        """The batch that a layer of the model reads through, and the layer's place in a block."""
        return self, layer

    def _first_read(self, contexts: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Per sequence the first block that its first row reaches."""
        if self.window is None:
            return np.zeros_like(contexts)
        block_size = self.kv.layout.block_size
        first: np.ndarray = np.maximum(contexts - rows - self.window + 1, 0) // block_size
        return first

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
        blocks = np.arange(tables.shape[1])
        read = (blocks < used[:, None]) & (blocks >= self._first_read(contexts, rows)[:, None])
        if (((tables < 0) | (tables >= num_blocks)) & read).any():
            raise ValueError(f"block_tables name a block outside a pool of {num_blocks}")
        if ((slots < 0) | (slots >= num_blocks * block_size)).any():
            raise ValueError(f"slot_mapping names a slot outside a pool of {num_blocks} blocks")


@dataclass(frozen=True)
class GroupedBatch:
    """The same rows through the block tables of every KV group; passed to the model as `paged=`."""

    groups: Sequence[PagedBatch]
    places: Sequence[tuple[int, int]]  # per layer of the model: its group, its place in a block

    def at(self, layer: int) -> tuple[PagedBatch, int]:
        """As `PagedBatch.at`."""
        group, place = self.places[layer]
        return self.groups[group], place
