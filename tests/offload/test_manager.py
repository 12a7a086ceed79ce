"""The manager's promises, told as stories."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload.block_file import BlockCorruptError
from offload.cpu_tier import CpuTier
from offload.disk_tier import DiskTier
from offload.manager import OffloadManager
from offload.store_scan import block_name
from offload.tier import BlockState, OffloadError
from tests.offload.harness import (
    BLOCK_BYTES,
    FINGERPRINT,
    RECORD_BYTES,
    FaultyTier,
    Planner,
    content,
    key,
    meta,
    named,
)

OpenDisk = Callable[..., DiskTier]


def block_path(store: Path, number: int) -> Path:
    return store / FINGERPRINT.hex() / "/".join(block_name(named(number)))


def test_a_block_becomes_visible_only_when_its_save_has_ended(
    cpu: CpuTier, open_disk: OpenDisk
) -> None:
    disk = FaultyTier(open_disk())
    planner = Planner(cpu, disk)
    manager = planner.manager
    disk.hanging.add("write")
    planner.commit(1)
    assert manager.lookup(key(1)) is None
    assert manager.pending_saves("cpu") == manager.pending_saves("disk") == 1

    transfers = manager.poll()
    [copy] = transfers.copies_out
    assert copy.block_id == 1
    assert [len(view) for view in copy.destinations] == [BLOCK_BYTES, BLOCK_BYTES]
    assert manager.lookup(key(1)) is None  # handed out is not executed
    planner.execute(transfers)
    assert manager.lookup(key(1)) == "cpu"
    assert disk.state(key(1)) is BlockState.SAVING
    assert manager.pending_saves("disk") == 1
    assert not manager.idle()

    disk.release.set()
    planner.settle()
    assert disk.state(key(1)) is BlockState.PRESENT
    assert manager.pending_saves("disk") == 0
    stats = manager.stats()
    assert (stats["cpu"].saved_blocks, stats["disk"].saved_blocks) == (1, 1)
    assert stats["disk"].store_bytes == BLOCK_BYTES


def test_each_block_is_saved_once_per_tier(cpu: CpuTier, open_disk: OpenDisk) -> None:
    disk = FaultyTier(open_disk())
    planner = Planner(cpu, disk)
    for _ in range(3):
        planner.commit(1)
        planner.round()
        planner.commit(1)
        planner.settle()
    assert disk.calls == ["write"]
    assert planner.manager.stats()["cpu"].saved_blocks == 1


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_a_load_brings_back_the_very_bytes(tier: str, cpu: CpuTier, open_disk: OpenDisk) -> None:
    planner = Planner(cpu, open_disk())
    for number in range(4):
        planner.commit(number)
    planner.settle()
    for number in range(4):
        assert planner.load(number, block_id=40, tier=tier) == content(number)
    stats = planner.manager.stats()[tier]
    assert (stats.loaded_blocks, stats.load_bytes) == (4, 4 * BLOCK_BYTES)
    assert stats.pinned_blocks == 0


def test_a_restart_finds_what_was_stored_and_loads_promote(
    cpu: CpuTier, open_disk: OpenDisk
) -> None:
    planner = Planner(open_disk())
    planner.commit(1)
    planner.settle()

    planner = Planner(cpu, open_disk())
    assert planner.manager.lookup(key(1)) == "disk"
    assert planner.load(1) == content(1)
    assert planner.manager.lookup(key(1)) == "cpu"
    assert cpu.meta(key(1)) == meta(1)
    assert planner.load(1, tier="cpu") == content(1)


def test_two_loads_of_one_block_both_arrive(cpu: CpuTier, open_disk: OpenDisk) -> None:
    first = Planner(open_disk())
    first.commit(1)
    first.settle()
    planner = Planner(cpu, open_disk())
    tickets = [planner.manager.load(key(1), 10), planner.manager.load(key(1), 11)]
    planner.settle()
    assert sorted(planner.loaded) == tickets
    assert planner.device[10] == planner.device[11] == content(1)


def test_loading_what_no_tier_holds_is_a_key_error(cpu: CpuTier, open_disk: OpenDisk) -> None:
    manager = Planner(cpu, open_disk()).manager
    for tier in (None, "cpu", "disk", "tape"):
        with pytest.raises(KeyError):
            manager.load(key(1), 0, tier)
    manager.check()


def test_a_block_being_loaded_is_not_evicted(cpu: CpuTier) -> None:
    planner = Planner(cpu)
    planner.commit(0)
    planner.settle()
    planner.manager.load(key(0), 60)
    under_way = planner.manager.poll()
    for number in range(1, 20):  # more than twice the tier
        planner.commit(number)
        planner.round()
    assert planner.manager.lookup(key(0)) == "cpu"
    assert planner.manager.stats()["cpu"].pinned_blocks == 1
    planner.execute(under_way)
    assert planner.device[60] == content(0)
    planner.commit(20)
    planner.round()
    assert planner.manager.lookup(key(0)) is None


def test_a_cpu_tier_smaller_than_the_device_still_fills_the_disk(open_disk: OpenDisk) -> None:
    cpu = CpuTier(2 * BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    disk = open_disk()
    planner = Planner(cpu, disk, staging_bytes=2 * BLOCK_BYTES)
    for number in range(60):
        planner.commit(number)
    planner.settle()
    assert set(disk.present()) == {key(number) for number in range(60)}
    assert planner.manager.stats()["disk"].saved_blocks == 60


def test_without_a_cpu_tier_saves_go_straight_to_disk(open_disk: OpenDisk) -> None:
    planner = Planner(open_disk(), staging_bytes=3 * BLOCK_BYTES)
    for number in range(20):
        planner.commit(number)
    planner.settle()
    assert planner.load(13, block_id=50) == content(13)
    assert planner.manager.lookup(key(19)) == "disk"


def test_a_withdrawn_block_is_saved_from_memory_or_counted_as_lost(open_disk: OpenDisk) -> None:
    cpu = CpuTier(BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    disk = FaultyTier(open_disk())
    disk.hanging.add("write")
    # Two staging buffers, one of them kept for loads, and one pin on memory.
    planner = Planner(cpu, disk, staging_bytes=2 * BLOCK_BYTES, io_threads=2)
    manager = planner.manager
    planner.commit(0)
    planner.round()  # takes the staging buffer for saves
    planner.commit(1)
    planner.commit(2)
    planner.round()  # 1 or 2 in memory, pinned for its write
    held = next(number for number in (1, 2) if manager.lookup(key(number)) == "cpu")
    other = 3 - held
    for number in (0, 1, 2):
        manager.withdraw(key(number))
        planner.device[number][:] = b"\xff" * BLOCK_BYTES  # the pool gave the block away
    assert manager.pending_saves("disk") == 2
    assert manager.stats()["disk"].skipped == {"put off, then lost": 1}
    disk.release.set()
    planner.settle()
    assert manager.lookup(key(other)) is None
    assert planner.load(0, block_id=30, tier="disk") == content(0)
    assert planner.load(held, block_id=30, tier="disk") == content(held)


def test_a_copy_handed_out_outlives_a_withdrawal(open_disk: OpenDisk) -> None:
    planner = Planner(open_disk())
    planner.commit(1)
    transfers = planner.manager.poll()
    planner.manager.withdraw(key(1))
    planner.execute(transfers)
    planner.settle()
    assert planner.load(1) == content(1)
    assert "put off, then lost" not in planner.manager.stats()["disk"].skipped


@pytest.mark.parametrize("phase", ["waiting", "reading", "ready"])
def test_a_cancelled_load_is_never_handed_out(phase: str, open_disk: OpenDisk) -> None:
    disk = FaultyTier(open_disk())
    planner = Planner(disk, staging_bytes=2 * BLOCK_BYTES)
    manager = planner.manager
    for number in range(3):
        planner.commit(number)
    planner.settle()
    if phase != "ready":
        disk.hanging.add("read")
    tickets = [manager.load(key(number), 40 + number) for number in range(3)]
    victim = tickets[2] if phase == "waiting" else tickets[0]
    if phase == "ready":
        time.sleep(0.1)
        manager._gather()
    if phase == "reading":
        manager.start_loads()
        deadline = time.monotonic() + 5
        while "read" not in disk.calls and time.monotonic() < deadline:
            time.sleep(0.001)
    manager.cancel(victim)
    manager.check()
    disk.release.set()
    planner.settle()
    assert sorted(planner.loaded) == [ticket for ticket in tickets if ticket != victim]
    assert planner.failed == []
    assert manager.stats()["disk"].pinned_blocks == 0
    manager.cancel(victim)  # again, and of an ended one: nothing
    manager.cancel(tickets[1])


def test_loads_overtake_saves(open_disk: OpenDisk) -> None:
    disk = FaultyTier(open_disk())
    planner = Planner(disk, io_threads=2)
    planner.commit(0)
    planner.settle()
    disk.hanging.add("write")
    for number in range(1, 30):
        planner.commit(number)
    planner.round()
    assert planner.load(0, block_id=50) == content(0)  # though every save thread hangs
    disk.release.set()
    planner.settle()
    assert planner.manager.stats()["disk"].saved_blocks == 30


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EMFILE])
def test_a_failed_save_vanishes_and_saving_resumes(
    number: int, cpu: CpuTier, open_disk: OpenDisk
) -> None:
    disk = FaultyTier(open_disk())
    planner = Planner(cpu, disk)
    disk.faults["write"] = OSError(number, os.strerror(number))
    planner.commit(1)
    planner.settle()
    stats = planner.manager.stats()["disk"]
    assert (stats.failed_blocks, stats.saved_blocks, stats.blocks) == (1, 0, 0)
    assert stats.skipped == {errno.errorcode[number]: 1}
    assert planner.manager.lookup(key(1)) == "cpu"
    del disk.faults["write"]
    planner.commit(2)
    planner.manager.touch([key(1)])  # still resident: its save is tried again when used
    planner.settle()
    assert set(disk.present()) == {key(1), key(2)}


def test_an_exception_of_any_kind_costs_one_block_and_no_thread(open_disk: OpenDisk) -> None:
    disk = FaultyTier(open_disk())
    planner = Planner(disk, io_threads=1)
    disk.faults["write"] = RuntimeError("a bug")
    planner.commit(1)
    planner.settle()
    assert planner.manager.stats()["disk"].skipped == {"RuntimeError": 1}
    del disk.faults["write"]
    planner.commit(2)
    planner.settle()
    assert disk.present() == [key(2)]


def test_a_hung_write_fails_at_its_deadline_and_keeps_its_buffer(open_disk: OpenDisk) -> None:
    disk = FaultyTier(open_disk())
    disk.hanging.add("write")
    planner = Planner(disk, staging_bytes=2 * BLOCK_BYTES, io_threads=3, write_deadline=0.05)
    manager = planner.manager
    planner.commit(1)
    planner.until(lambda: manager.stats()["disk"].failed_blocks == 1)
    assert manager.pending_saves("disk") == 0
    assert manager._staging.num_free == 1  # the thread may still read the other
    disk.hanging.clear()
    planner.commit(2)
    planner.round()
    assert manager.pending_saves("disk") == 1  # put off for want of a buffer
    disk.release.set()
    planner.settle()
    planner.until(lambda: manager._staging.num_free == 2)
    assert set(disk.present()) == {key(1), key(2)}  # the late one is whole, and welcome
    assert manager.stats()["disk"].skipped == {"ETIMEDOUT": 1}


def test_a_hung_disk_is_a_miss_and_flush_ends(cpu: CpuTier, open_disk: OpenDisk) -> None:
    disk = FaultyTier(open_disk())
    planner = Planner(
        cpu, disk, io_threads=2, stall_seconds=0.05, write_deadline=0.1, staging_bytes=1 << 20
    )
    manager = planner.manager
    planner.commit(1)
    planner.settle()
    for number in range(2, 10):  # displaces 1 from memory
        planner.commit(number)
    planner.settle()
    assert manager.lookup(key(1)) == "disk"
    disk.hanging |= {"read", "write"}
    tickets = [manager.load(key(1), 50), manager.load(key(1), 51)]
    planner.until(lambda: manager.lookup(key(1)) is None)
    planner.commit(20)
    planner.until(lambda: manager.lookup(key(20)) == "cpu")  # memory goes on
    flushed = asyncio.run(manager.flush(planner.pump))
    assert flushed == {"saved": {"cpu": 0, "disk": 0}, "failed": {"cpu": 0, "disk": 1}}
    for ticket in tickets:
        manager.cancel(ticket)
    disk.release.set()
    planner.settle()
    assert manager.lookup(key(1)) is not None
    assert disk.state(key(20)) is BlockState.PRESENT
    assert planner.loaded == []


def test_a_damaged_block_fails_its_load_once_and_its_file_goes(
    cpu: CpuTier, open_disk: OpenDisk, store: Path
) -> None:
    first = Planner(open_disk())
    first.commit(1)
    first.settle()
    path = block_path(store, 1)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)

    planner = Planner(cpu, open_disk())
    assert planner.load(1) is None
    planner.until(lambda: not path.exists())
    planner.settle()
    assert planner.manager.lookup(key(1)) is None  # neither on disk nor promoted
    stats = planner.manager.stats()["disk"]
    assert (stats.verify_failures, stats.skipped) == (1, {"payload": 1})
    planner.commit(1)  # recomputed
    planner.settle()
    assert planner.load(1, tier="disk") == content(1)


def test_a_vanished_file_is_a_miss(open_disk: OpenDisk, store: Path) -> None:
    planner = Planner(open_disk())
    planner.commit(1)
    planner.commit(2)
    planner.settle()
    block_path(store, 1).unlink()
    assert planner.load(1) is None
    assert planner.manager.stats()["disk"].skipped == {"vanished": 1}
    assert planner.manager.lookup(key(1)) is None
    os.rename(store, store.with_name("gone"))
    assert planner.load(2) == content(2)  # the directory is known by more than its name


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
def test_an_unreadable_block_is_not_retried_for_ever(number: int, open_disk: OpenDisk) -> None:
    disk = FaultyTier(open_disk())
    planner = Planner(disk)
    planner.commit(1)
    planner.settle()
    disk.faults["read"] = OSError(number, os.strerror(number))
    assert planner.load(1) is None
    assert planner.manager.lookup(key(1)) is None
    assert planner.manager.stats()["disk"].failed_blocks == 1


async def test_flush_saves_what_only_memory_holds(cpu: CpuTier, open_disk: OpenDisk) -> None:
    disk = FaultyTier(open_disk())
    planner = Planner(cpu, disk)
    disk.faults["write"] = OSError(errno.ENOSPC, "full")
    for number in range(5):
        planner.commit(number)
    planner.settle()
    for number in range(4):
        planner.manager.withdraw(key(number))
    del disk.faults["write"]
    result = await planner.manager.flush(planner.pump)
    assert result == {"saved": {"cpu": 0, "disk": 5}, "failed": {"cpu": 0, "disk": 0}}
    assert disk.calls[-1] == "sync"
    assert set(disk.present()) == {key(number) for number in range(5)}
    again = await planner.manager.flush(planner.pump)
    assert again["saved"] == {"cpu": 0, "disk": 0}


async def test_flush_tells_of_failures(cpu: CpuTier, open_disk: OpenDisk) -> None:
    disk = FaultyTier(open_disk())
    planner = Planner(cpu, disk)
    disk.faults["write"] = OSError(errno.ENOSPC, "full")
    planner.commit(1)
    result = await planner.manager.flush(planner.pump)
    assert result == {"saved": {"cpu": 1, "disk": 0}, "failed": {"cpu": 0, "disk": 1}}
    del disk.faults["write"]
    disk.faults["sync"] = OSError(errno.EIO, "bad disk")
    result = await planner.manager.flush(planner.pump)
    assert result == {"saved": {"cpu": 0, "disk": 0}, "failed": {"cpu": 0, "disk": 1}}


async def test_a_reset_is_at_once_durable_and_final(cpu: CpuTier, open_disk: OpenDisk) -> None:
    disk = FaultyTier(open_disk())
    planner = Planner(cpu, disk, io_threads=3)
    manager = planner.manager
    planner.commit(1)
    planner.settle()
    disk.hanging.add("write")
    planner.commit(2)
    planner.round()  # its write is in flight
    planner.commit(3)  # pending
    waiting = manager.load(key(1), 50, "disk")

    resetting = asyncio.create_task(manager.reset(["cpu", "disk"]))
    await asyncio.sleep(0)
    assert [manager.lookup(key(number)) for number in (1, 2, 3)] == [None] * 3
    assert await resetting == {"cpu": 2, "disk": 1}
    disk.hanging.clear()
    disk.release.set()
    planner.settle()
    assert planner.failed == [waiting]
    assert disk.present() == []
    assert open_disk().present() == []

    planner.commit(4)  # the tiers take new blocks at once
    planner.settle()
    assert open_disk().present() == [key(4)]
    manager.check()


async def test_a_reset_of_disk_alone_keeps_memory_and_does_not_refill(
    cpu: CpuTier, open_disk: OpenDisk
) -> None:
    disk = open_disk()
    planner = Planner(cpu, disk)
    planner.commit(1)
    planner.settle()
    assert await planner.manager.reset(["disk"]) == {"disk": 1}
    assert planner.manager.lookup(key(1)) == "cpu"
    await planner.manager.flush(planner.pump)
    assert disk.present() == []
    planner.commit(1)
    planner.settle()
    assert disk.present() == [key(1)]


async def test_what_was_on_its_way_into_memory_does_not_refill_a_disk_reset_meanwhile(
    cpu: CpuTier, open_disk: OpenDisk
) -> None:
    disk = open_disk()
    planner = Planner(cpu, disk)
    planner.commit(1)
    under_way = planner.manager.poll()
    planner.manager.withdraw(key(1))
    await planner.manager.reset(["disk"])
    planner.execute(under_way)
    assert planner.manager.lookup(key(1)) == "cpu"
    await planner.manager.flush(planner.pump)
    assert disk.present() == []
    planner.manager.withdraw(key(1))
    planner.commit(1)  # computed anew
    planner.settle()
    assert disk.present() == [key(1)]


async def test_a_block_being_read_when_the_disk_is_reset_does_not_stay_in_memory(
    cpu: CpuTier, open_disk: OpenDisk
) -> None:
    disk = FaultyTier(open_disk())
    first = Planner(disk)
    first.commit(1)
    first.settle()
    planner = Planner(cpu, disk)
    disk.hanging.add("read")
    ticket = planner.manager.load(key(1), 50)
    planner.manager.start_loads()
    planner.until(lambda: "read" in disk.calls)
    resetting = asyncio.create_task(planner.manager.reset(["disk"]))
    await asyncio.sleep(0)
    disk.release.set()
    await resetting
    planner.settle()
    assert planner.failed == [ticket]
    assert planner.manager.lookup(key(1)) is None
    planner.manager.check()


async def test_a_copy_under_way_keeps_its_source_through_a_reset(cpu: CpuTier) -> None:
    planner = Planner(cpu)
    planner.commit(1)
    planner.settle()
    planner.manager.load(key(1), 50)
    transfers = planner.manager.poll()
    await planner.manager.reset(["cpu"])
    for number in range(10, 18):  # fill every other slot
        planner.commit(number)
    out = planner.manager.poll()
    assert out.failed_loads == []  # it is being copied: its end is reported by who copies
    for copy in out.copies_out:
        copy.destinations[0][:] = bytes(BLOCK_BYTES)
    planner.execute(transfers)
    assert planner.device[50] == content(1)
    planner.manager.copied_out(out.copies_out)
    planner.manager.check()


@pytest.mark.parametrize("tier", ["cpu", "disk"])
async def test_a_load_not_yet_copied_fails_with_the_reset_of_its_tier(
    tier: str, cpu: CpuTier, open_disk: OpenDisk
) -> None:
    """Its bytes are there and whole, but they are of before the reset."""
    planner = Planner(cpu, open_disk())
    planner.commit(1)
    planner.settle()
    ticket = planner.manager.load(key(1), 50, tier)
    if tier == "disk":
        planner.manager.start_loads()
        while not planner.manager._loads.has_news:
            planner.manager._gather()
            await asyncio.sleep(0.001)
    await planner.manager.reset([tier])
    transfers = planner.round()
    assert (transfers.failed_loads, transfers.copies_in) == ([ticket], [])
    assert planner.device[50] == bytes(BLOCK_BYTES)


async def test_a_reset_that_is_not_durable_says_so(open_disk: OpenDisk) -> None:
    disk = FaultyTier(open_disk())
    planner = Planner(disk)
    planner.commit(1)
    planner.settle()
    disk.faults["wipe"] = OSError(errno.EROFS, "read-only")
    with pytest.raises(OffloadError, match="a restart may find its old blocks"):
        await planner.manager.reset(["disk"])
    assert planner.manager.lookup(key(1)) is None


async def test_reset_of_an_unknown_tier_drops_nothing(cpu: CpuTier) -> None:
    planner = Planner(cpu)
    planner.commit(1)
    planner.settle()
    with pytest.raises(KeyError):
        await planner.manager.reset(["cpu", "tape"])
    assert planner.manager.lookup(key(1)) == "cpu"


def test_touching_keeps_a_chain_from_its_root(cpu: CpuTier) -> None:
    planner = Planner(cpu)  # eight slots
    for number in range(8):
        planner.commit(number)
    planner.settle()
    planner.manager.touch([key(number) for number in range(4)])
    for number in range(10, 17):  # one more than the untouched and three of the chain leave
        planner.commit(number)
    planner.settle()
    held = [number for number in range(8) if planner.manager.lookup(key(number))]
    assert held == [0]


def test_load_cost_is_measured(cpu: CpuTier, open_disk: OpenDisk) -> None:
    planner = Planner(cpu, open_disk())
    manager = planner.manager
    assert manager.estimated_load_seconds("disk", 4) is None
    planner.commit(1)
    planner.settle()
    planner.load(1, block_id=9, tier="disk")
    one = manager.estimated_load_seconds("disk", 1)
    many = manager.estimated_load_seconds("disk", 100)
    assert one is not None
    assert many is not None
    assert 0 < one < many
    assert manager.estimated_load_seconds("cpu", 1) is None
    manager.load(key(1), 9, "cpu")
    manager.copied_in(manager.poll().copies_in, seconds=0.25)
    assert manager.estimated_load_seconds("cpu", 3) == 0.75


def test_wake_is_called_when_there_is_news(open_disk: OpenDisk) -> None:
    planner = Planner(open_disk())
    planner.commit(1)
    assert planner.woken.is_set()
    planner.round()
    planner.woken.clear()
    assert planner.woken.wait(5)  # the write has ended
    planner.round()
    assert planner.manager.idle()
    planner.woken.clear()
    planner.manager.load(key(1), 3)
    assert planner.woken.wait(5)


def test_rounds_are_bounded_and_the_rest_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.manager._MAX_ROUND_BYTES", 4 * BLOCK_BYTES)
    planner = Planner(CpuTier(32 * BLOCK_BYTES, block_bytes=BLOCK_BYTES))
    for number in range(10):
        planner.commit(number)
    assert [len(planner.round().copies_out) for _ in range(4)] == [4, 4, 2, 0]
    for number in range(10):
        planner.manager.load(key(number), 40)
    assert [len(planner.round().copies_in) for _ in range(4)] == [4, 4, 2, 0]


async def test_without_tiers_it_is_the_null_object() -> None:
    manager = OffloadManager([], block_bytes=BLOCK_BYTES)
    manager.offer(key(1), meta(1), 0)
    manager.touch([key(1)])
    assert not manager.poll()
    assert manager.lookup(key(1)) is None
    manager.withdraw(key(1))
    assert manager.idle()
    assert manager.stats() == {}

    async def pump() -> None:
        manager.poll()

    assert await manager.flush(pump) == {"saved": {}, "failed": {}}
    assert await manager.reset([]) == {}
    manager.check()
    await manager.close(pump)


async def test_close_flushes_and_keeps_the_order_of_use(open_disk: OpenDisk) -> None:
    planner = Planner(
        DiskTier.open(
            open_disk()._directory._path,
            fingerprint=FINGERPRINT,
            block_bytes=BLOCK_BYTES,
            capacity_bytes=64 << 20,
        )
    )
    for number in range(3):
        planner.commit(number)
        planner.settle()
        await asyncio.sleep(0.02)
    planner.manager.touch([key(0)])
    planner.commit(3)
    await planner.manager.close(planner.pump)
    assert open_disk().present() == [key(1), key(2), key(0), key(3)]


async def test_close_leaves_a_hung_call_behind(open_disk: OpenDisk, monkeypatch: Any) -> None:
    monkeypatch.setattr("offload.manager._CLOSE_SECONDS", 0.05)
    disk = FaultyTier(open_disk())
    disk.hanging.add("write")
    planner = Planner(disk)
    planner.commit(1)
    planner.round()
    started = time.monotonic()
    await planner.manager.close()
    assert time.monotonic() - started < 2
    disk.release.set()


def test_the_cap_makes_room_by_evicting_the_least_recently_used(open_disk: OpenDisk) -> None:
    disk = open_disk(capacity=8 * RECORD_BYTES + 14 * 4096)
    planner = Planner(disk)
    for number in range(30):
        planner.commit(number)
        planner.settle()
    stats = planner.manager.stats()["disk"]
    assert stats.saved_blocks == 30
    assert stats.blocks + stats.evicted_blocks == 30
    numbers = [number for number in range(30) if planner.manager.lookup(key(number))]
    assert numbers == list(range(30 - stats.blocks, 30))
    assert stats.blocks >= 5


def test_a_probe_measures_the_disk_before_anybody_waits_for_it(open_disk: OpenDisk) -> None:
    disk = FaultyTier(open_disk())
    planner = Planner(disk)
    for number in range(3):
        planner.commit(number)
    planner.settle()
    assert planner.manager.estimated_load_seconds("disk", 1) is None
    planner.manager.probe()
    planner.manager.check()
    planner.settle()
    assert planner.manager.estimated_load_seconds("disk", 1) > 0.0
    assert disk.calls.count("read") == 3
    stats = planner.manager.stats()["disk"]
    assert (stats.loaded_blocks, stats.pinned_blocks) == (0, 0)


def test_a_probe_that_finds_a_bad_block_drops_it(open_disk: OpenDisk) -> None:
    disk = FaultyTier(open_disk())
    planner = Planner(disk)
    planner.commit(1)
    planner.settle()
    disk.faults["read"] = BlockCorruptError("payload", "planted")
    planner.manager.probe()
    planner.settle()
    assert planner.manager.lookup(key(1)) is None
    assert planner.manager.stats()["disk"].verify_failures == 1
