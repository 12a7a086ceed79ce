"""States, pins and order of use."""

from __future__ import annotations

import pytest

from offload.block_index import BlockIndex
from offload.tier import BlockState, Entry, FoundBlock
from tests.offload.harness import key


def stored(index: BlockIndex, number: int) -> Entry:
    entry = Entry(key(number), 10)
    index.begin_save(entry)
    assert index.state(key(number)) is BlockState.SAVING
    index.publish(entry)
    index.check()
    return entry


def test_a_block_goes_through_its_states() -> None:
    index = BlockIndex()
    entry = stored(index, 1)
    assert (index.state(key(1)), len(index), index.num_bytes) == (BlockState.PRESENT, 1, 10)
    index.begin_evict(entry)
    assert (index.state(key(1)), len(index), index.num_bytes) == (BlockState.EVICTING, 0, 10)
    assert index.busy
    with pytest.raises(ValueError, match="evicting"):
        index.begin_save(Entry(key(1), 10))
    index.restore(entry)
    assert index.present() == [key(1)]
    index.begin_evict(entry)
    index.forget(entry)
    assert (index.state(key(1)), index.num_bytes, index.busy) == (BlockState.ABSENT, 0, False)
    assert not index.owns(entry)
    index.check()


def test_order_of_use_and_pins() -> None:
    index = BlockIndex()
    for number in range(4):
        stored(index, number)
    assert index.touch(key(1), 5.0)
    assert not index.touch(key(9), 5.0)
    assert index.present() == [key(0), key(2), key(3), key(1)]
    pinned = index.pin(key(0))
    index.pin(key(0))
    assert [entry.key for entry in index.evictable()] == [key(2), key(3), key(1)]
    assert (index.pinned_blocks, index.num_pins) == (1, 2)
    index.unpin(pinned)
    index.unpin(pinned)
    assert (index.pinned_blocks, index.num_pins, index.busy) == (0, 0, False)
    with pytest.raises(ValueError, match="without a pin"):
        index.unpin(pinned)
    with pytest.raises(KeyError):
        index.pin(key(9))
    restored = index.get(key(1))
    index.begin_evict(restored)
    index.restore(restored)
    assert index.present()[0] == key(1)  # next to go again


def test_old_handles_do_not_touch_newer_blocks() -> None:
    index = BlockIndex()
    old = stored(index, 1)
    index.pin(key(1))
    held, saving = index.clear()
    assert (held, saving) == ([old], [])
    new = stored(index, 1)
    assert index.owns(new)
    assert not index.owns(old)
    index.unpin(old)
    assert new.pins == 0
    index.check()


def test_adopting_leaves_known_blocks_alone() -> None:
    index = BlockIndex()
    entry = stored(index, 1)
    saving = Entry(key(2), 0)
    index.begin_save(saving)
    index.adopt([FoundBlock(key(number), b"root", b"parent", 7, 1.0) for number in (1, 2, 3)])
    assert index.present() == [key(1), key(3)]
    assert index.get(key(1)) is entry
    assert index.num_bytes == 17
    assert index.stored().keys() == {key(1), key(3)}
    index.check()
