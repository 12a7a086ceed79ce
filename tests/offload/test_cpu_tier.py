"""The CPU tier's promises."""

from __future__ import annotations

import resource

import pytest

from offload.cpu_tier import CpuTier
from offload.tier import BlockState, TierOpenError, WriteResult
from tests.offload.harness import BLOCK_BYTES, content, key, meta, root

DONE = WriteResult(num_bytes=BLOCK_BYTES)
FAILED = WriteResult(OSError("no"))


def save(tier: CpuTier, number: int) -> None:
    reservation = tier.reserve(key(number), meta(number))
    assert reservation is not None
    tier.write(reservation, meta(number), memoryview(content(number)))
    assert tier.settle(reservation, DONE)
    tier.check()


def test_stored_evicted_refused_while_pinned() -> None:
    tier = CpuTier(3 * BLOCK_BYTES + 5, block_bytes=BLOCK_BYTES)
    for number in range(3):
        save(tier, number)
    tier.touch(key(0))
    save(tier, 3)
    assert tier.present() == [key(2), key(0), key(3)]
    pins = [tier.pin(number) for number in tier.present()]
    assert tier.reserve(key(4), meta(4)) is None
    tier.unpin(pins[1])
    reservation = tier.reserve(key(4), meta(4))
    assert reservation is not None
    assert [entry.key for entry in reservation.evicted] == [key(0)]
    assert tier.usage().evicted_blocks == 2
    assert bytes(tier.slot(pins[0])) == content(2)
    tier.check()


def test_chains_are_known() -> None:
    tier = CpuTier(4 * BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    for number in (1, 2):
        save(tier, number)
    promotion = tier.reserve(key(3), None)
    assert promotion is not None
    assert tier.settle(promotion, WriteResult(num_bytes=BLOCK_BYTES, meta=meta(3)))
    assert tier.children(key(1).block_hash) == [key(2)]
    assert tier.children(key(2).block_hash) == [key(3)]
    assert (tier.read_meta(key(3)), tier.read_meta(key(4))) == (meta(3), None)
    entry = tier.pin(key(3))
    assert (entry.root_tag, entry.parent_tag) == (root()[:8], key(2).block_hash[:8])


def test_a_failed_save_leaves_nothing() -> None:
    tier = CpuTier(BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    reservation = tier.reserve(key(1), meta(1))
    assert reservation is not None
    assert tier.state(key(1)) is BlockState.SAVING
    assert tier.reserve(key(2), meta(2)) is None  # a block being saved is not evicted
    with pytest.raises(ValueError, match="saving"):
        tier.reserve(key(1), meta(1))
    assert not tier.settle(reservation, FAILED)
    assert tier.state(key(1)) is BlockState.ABSENT
    save(tier, 2)


def test_a_reset_frees_slots_only_when_nobody_uses_them() -> None:
    tier = CpuTier(3 * BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    save(tier, 0)
    save(tier, 1)
    pin = tier.pin(key(0))
    saving = tier.reserve(key(2), meta(2))
    assert saving is not None
    assert tier.drop_all() == 2
    tier.check()
    assert tier.present() == []
    save(tier, 5)  # one slot is free at once
    blocked = tier.pin(key(5))
    assert tier.reserve(key(6), meta(6)) is None
    assert bytes(tier.slot(pin)) == content(0)
    tier.unpin(pin)
    save(tier, 6)
    assert not tier.settle(saving, DONE)  # overtaken
    assert tier.state(key(2)) is BlockState.ABSENT
    save(tier, 7)
    tier.unpin(blocked)
    assert tier.num_pins() == 0
    tier.check()


def test_memory_never_used_is_not_resident() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tier = CpuTier(1 << 30, block_bytes=1 << 20)
    for number in range(8):
        reservation = tier.reserve(key(number), meta(number))
        assert reservation is not None
        tier.slot(reservation.entry)[:] = b"\1" * (1 << 20)
        tier.settle(reservation, WriteResult(num_bytes=1 << 20))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 64 << 10  # KiB


def test_too_small_or_too_large_is_told() -> None:
    with pytest.raises(TierOpenError, match="hold no block of 8192 bytes"):
        CpuTier(BLOCK_BYTES - 1, block_bytes=BLOCK_BYTES)
    with pytest.raises(TierOpenError, match="cannot map"):
        CpuTier(1 << 60, block_bytes=BLOCK_BYTES)
