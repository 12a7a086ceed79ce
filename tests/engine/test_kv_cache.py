from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from engine.errors import StartupError
from engine.kv_cache import KVCache
from engine.kv_layout import KVLayout

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=5, block_size=4, dtype="float32")


def test_views_have_heads_before_tokens_and_cover_each_byte_once() -> None:
    kv = KVCache(6, LAYOUT)
    assert kv.pool.shape == (6, LAYOUT.block_bytes)
    planes = [view(layer) for layer in range(3) for view in (kv.key, kv.value)]
    assert all(plane.shape == (6, 2, 4, 5) for plane in planes)
    for number, plane in enumerate(planes):
        plane.fill_(number)
    block = kv.pool.view(torch.float32)[4]
    expected = torch.arange(6.0).repeat_interleave(LAYOUT.plane_elements)
    assert torch.equal(block, expected)


def test_within_a_plane_a_token_is_contiguous_and_a_head_follows_a_head() -> None:
    kv = KVCache(2, LAYOUT)
    kv.value(1)[1, 1, 2, 3] = 7.0
    flat = kv.pool.view(torch.float32)
    # layer 1, values, head 1, token 2, dim 3
    index = ((1 * 2 + 1) * 2 + 1) * 4 * 5 + 2 * 5 + 3
    assert flat[1, index] == 7.0
    assert flat.count_nonzero() == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_views_have_the_layouts_dtype(dtype: str) -> None:
    kv = KVCache(1, KVLayout(1, 1, 1, 1, dtype))
    assert kv.dtype == kv.key(0).dtype == kv.value(0).dtype == getattr(torch, dtype)


def test_untouched_blocks_cost_no_memory() -> None:
    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    layout = KVLayout(4, 4, 64, 16, "float32")
    before = resident()
    kv = KVCache((1 << 30) // layout.block_bytes, layout)
    kv.key(2)[100].fill_(1.0)
    assert resident() - before < 64 << 20


def test_a_pool_that_cannot_be_had_names_its_size_and_the_flag() -> None:
    with pytest.raises(StartupError, match=r"GiB.*--kv-memory"):
        KVCache(1 << 45, LAYOUT)


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        KVCache(0, LAYOUT)
