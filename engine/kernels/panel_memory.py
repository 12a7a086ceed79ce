"""Memory for packed weights, in large pages where the system has them.

Every step reads every weight once, so each page of 4 KiB costs a walk through the page tables each
time: from pages of 2 MiB, products with float32 weights were measured a tenth faster. A weight of a
small model is shorter than such a page, so they lie one behind the other in few mappings.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch
from torch import Tensor

Place = Callable[[int], Tensor]  # from a number of bytes to uint8 [bytes] of zeros

ALIGNMENT = 64  # bytes: a cache line
PAGE = 1 << 21
MAPPING = 1 << 25  # more than it takes is only reserved: no page of it exists before it is written


def plain_memory(size: int) -> Tensor:
    """A `Place` of its own for each."""
    return torch.zeros(size, dtype=torch.uint8)


class PanelMemory:
    """A `Place` for the weights of one model; a mapping lives as long as anything that is in it."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def __call__(self, size: int) -> Tensor:
        """uint8 [size] of zeros, aligned to a cache line, shared with nobody."""
        taken = -(-size // ALIGNMENT) * ALIGNMENT
        if taken > self._rest.numel():
            self._rest = _large_pages(max(MAPPING, -(-taken // PAGE) * PAGE))
        place, self._rest = self._rest[:size], self._rest[taken:]
        return place


def _large_pages(size: int) -> Tensor:
    """A new mapping of `size` bytes, a multiple of PAGE, that begins where a large page can."""
    # Private: shared memory has no large pages, as a rule.
    mapping = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise(mapping)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    skipped = -whole.data_ptr() % PAGE
    return whole[skipped : skipped + size]


def _advise(mapping: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them: small pages do
            return
