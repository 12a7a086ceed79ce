"""Questions about the tiers, and blocks brought into memory ahead of their use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from offload import inquiry
from offload.cpu_tier import CpuTier
from offload.disk_tier import DiskTier
from offload.tier import BlockHash, BlockKey, BlockMeta
from tests.offload.harness import BLOCK_BYTES, FaultyTier, Planner, key, meta

OpenDisk = Callable[..., DiskTier]


def stored(planner: Planner, *numbers: int) -> None:
    for number in numbers:
        planner.commit(number)
    planner.settle()


def fresh(disk: DiskTier | FaultyTier, *above: CpuTier) -> Planner:
    """A planner whose device holds nothing, over the same disk."""
    return Planner(*above, disk)


def test_holders_are_named_nearest_first(cpu: CpuTier, open_disk: OpenDisk) -> None:
    disk = open_disk()
    stored(fresh(disk), 1)
    planner = fresh(disk, cpu)
    stored(planner, 2)
    holders = planner.manager.inquiry.holders
    assert holders(key(1)) == ["disk"]
    assert holders(key(2)) == ["cpu", "disk"]
    assert holders(key(3)) == []


async def test_children_are_found_wherever_they_lie(cpu: CpuTier, open_disk: OpenDisk) -> None:
    disk = open_disk()
    stored(fresh(disk), 1)
    planner = fresh(disk, cpu)
    planner.commit(4)  # offered, in no tier yet
    parent_of_1, parent_of_4 = meta(1).parent_hash, meta(4).parent_hash
    asked = planner.manager.inquiry
    assert asked.children(parent_of_1) == [key(1)]
    assert asked.children(parent_of_4) == [key(4)]
    assert asked.children(BlockHash(b"n" * 32)) == []
    assert await asked.metas([key(1), key(4), key(9)]) == {key(1): meta(1), key(4): meta(4)}


async def test_a_damaged_block_does_not_tell(open_disk: OpenDisk) -> None:
    disk = open_disk()
    stored(fresh(disk), 1, 2)
    for path in disk._directory._path.rglob(f"{key(1).block_hash.hex()}*"):
        path.write_bytes(b"\0" * 4096)
    assert await fresh(disk).manager.inquiry.metas([key(1), key(2)]) == {key(2): meta(2)}


async def test_a_hung_disk_costs_the_answer_alone(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inquiry, "_ANSWER_SECONDS", 0.05)
    disk = FaultyTier(open_disk())
    stored(fresh(disk), 1)
    disk.hanging.add("read_meta")
    assert await asyncio.wait_for(fresh(disk).manager.inquiry.metas([key(1)]), 5) == {}
    disk.release.set()


async def test_another_fingerprint_is_found_by_names_up_to_the_first_gap(
    open_disk: OpenDisk,
) -> None:
    stranger = open_disk(fingerprint=b"x" * 32)
    stored(fresh(stranger), 1, 2, 4)

    def metas_under(fingerprint: bytes) -> Sequence[tuple[BlockKey, BlockMeta]]:
        assert fingerprint == b"x" * 32  # never asked about our own
        return [(key(number), meta(number)) for number in (1, 2, 3, 4)]

    disk = open_disk()
    found = await fresh(disk).manager.inquiry.elsewhere(metas_under)
    assert found == dict.fromkeys((0, 1), (b"x" * 32).hex())


def test_a_promotion_ends_in_memory(cpu: CpuTier, open_disk: OpenDisk) -> None:
    disk = open_disk()
    stored(fresh(disk), 1)
    planner = fresh(disk, cpu)
    manager = planner.manager
    ticket = manager.promote(key(1))
    assert ticket is not None
    assert manager.in_flight(ticket)
    planner.until(lambda: not manager.in_flight(ticket))
    assert manager.inquiry.holders(key(1)) == ["cpu", "disk"]
    assert (planner.loaded, planner.failed) == ([], [])  # no copy, no failure
    assert manager.stats()["cpu"].promoted_blocks == 1
    assert manager.idle()
    manager.check()
    assert planner.load(1) is not None  # what is in memory is the block


def test_there_is_nothing_to_promote_from_memory_without_memory_or_unheld(
    cpu: CpuTier, open_disk: OpenDisk
) -> None:
    disk = open_disk()
    stored(fresh(disk), 1)
    assert fresh(disk).manager.promote(key(1)) is None
    planner = fresh(disk, cpu)
    stored(planner, 2)
    assert planner.manager.promote(key(2)) is None
    assert planner.manager.promote(key(3)) is None


@pytest.mark.parametrize("fault", [None, OSError(5, "EIO")])
def test_a_promotion_cancelled_or_failed_leaves_nothing_held(
    cpu: CpuTier, open_disk: OpenDisk, fault: Exception | None
) -> None:
    disk = FaultyTier(open_disk())
    stored(fresh(disk), 1)
    planner = fresh(disk, cpu)
    disk.hanging.add("read")
    ticket = planner.manager.promote(key(1))
    assert ticket is not None
    planner.manager.start_loads()
    if fault is None:
        planner.manager.cancel(ticket)
    else:
        disk.faults["read"] = fault
    disk.release.set()
    planner.settle()
    planner.manager.check()
    assert planner.failed == ([] if fault is None else [ticket])
    assert planner.manager.stats()["cpu"].pinned_blocks == 0


def test_a_promotion_without_room_fails_at_once(open_disk: OpenDisk) -> None:
    disk = open_disk()
    stored(fresh(disk), 1, 2)
    cpu = CpuTier(BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    planner = fresh(disk, cpu)
    first, second = (planner.manager.promote(key(number)) for number in (1, 2))
    planner.settle()  # the only slot is filling when the second asks for one
    assert planner.failed == [second]
    assert planner.manager.inquiry.holders(key(1)) == ["cpu", "disk"]
    assert first != second
