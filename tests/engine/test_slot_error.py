"""The error of a slot: the largest, never an average; padding and noise say nothing."""

from __future__ import annotations

import hashlib

import pytest
import torch

from engine.kv_cache import KVCache
from engine.kv_layout import KVLayout
from engine.slot_error import compare, slot_errors
from engine.step import BlockPair

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=16, dtype="float32")


@pytest.fixture
def kv() -> KVCache:
    cache = KVCache(2, LAYOUT)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(cache._pages[0].shape, generator=generator)
    cache._pages[:] = values
    return cache


def test_one_slot_of_one_head_is_found_and_named(kv: KVCache) -> None:
    kv._pages[0, 1, 1, 1, 13] = kv._pages[0, 1, 1, 1, 12]
    found = compare(kv, (4, 9), BlockPair(0, 0, 1))
    worst = found.worst
    assert (worst.layer, worst.part, worst.head, worst.slot) == (9, "value", 1, 13)
    own, other = kv._pages[1, 1, 1, 1, 13], kv._pages[0, 1, 1, 1, 13]
    assert 0.3 < worst.error <= float((own - other).norm() / own.norm())
    assert found.digest == hashlib.sha256(kv.pool[0].numpy().tobytes()).hexdigest()
    assert found.computed_digest == hashlib.sha256(kv.pool[1].numpy().tobytes()).hexdigest()


def test_equal_blocks_are_at_no_distance_whatever_lies_in_the_padding(kv: KVCache) -> None:
    kv._pages[0, 2] = torch.nan
    assert compare(kv, (0, 1), BlockPair(0, 0, 1)).worst.error == 0.0


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_is_infinitely_far(kv: KVCache, which: int, value: float) -> None:
    kv._pages[which, 0, 0, 1, 5, 3] = value
    worst = compare(kv, (0, 1, 2), BlockPair(0, 0, 1)).worst
    assert worst.error == torch.inf
    assert (worst.layer, worst.part, worst.head, worst.slot) == (0, "key", 1, 5)


def test_zeros_equal_zeros() -> None:
    zeros = torch.zeros(1, 2, 1, 4, 8)
    assert slot_errors(zeros, zeros).max() == 0.0


def test_noise_on_a_slot_of_next_to_no_length_is_noise() -> None:
    """A token that attention ignores: its values are near zero, their noise is not."""
    computed = torch.ones(1, 2, 1, 4, 8)
    computed[..., 0, :] = 1e-6
    found = computed + 1e-5
    assert slot_errors(found, computed).max() < 2e-5
