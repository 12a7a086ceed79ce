"""Pins: what they keep, how much, how long, and what they do not survive."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from offload.cpu_tier import CpuTier
from offload.disk_tier import DiskTier
from offload.history import EVICTED, FAILED_VERIFICATION, LOST, RESET, SAVE_FAILED, SUPERSEDED
from offload.tier import PIN_SHARE
from tests.offload.harness import BLOCK_BYTES, RECORD_BYTES, FaultyTier, Planner, content, key
from tests.offload.test_manager import block_path

OpenDisk = Callable[..., DiskTier]


def keys(*numbers: int) -> list:
    return [key(number) for number in numbers]


def held(planner: Planner, numbers: range) -> list[int]:
    return [number for number in numbers if planner.manager.lookup(key(number))]


def fill(planner: Planner, numbers: range) -> None:
    for number in numbers:
        planner.commit(number)
        planner.settle()


def test_a_pinned_chain_outlives_what_would_evict_it(cpu: CpuTier) -> None:
    planner = Planner(cpu)  # eight blocks
    manager = planner.manager
    fill(planner, range(3))
    assert manager.pin("chat", keys(0, 1, 2), math.inf) == (3, 3 * BLOCK_BYTES)
    assert manager.stats()["cpu"].pinned_blocks == 3
    fill(planner, range(10, 30))
    assert held(planner, range(10)) == [0, 1, 2]
    assert planner.load(1) == content(1)  # as usable as ever
    assert manager.unpin("chat") == (3, 3 * BLOCK_BYTES)
    assert manager.unpin("chat") == (0, 0)
    assert manager.stats()["cpu"].pinned_blocks == 0
    fill(planner, range(30, 50))
    assert held(planner, range(10)) == []
    manager.check()


def test_pins_take_half_of_a_tier_and_the_leading_blocks(cpu: CpuTier) -> None:
    planner = Planner(cpu)
    manager = planner.manager
    fill(planner, range(8))
    assert manager.pin("long", keys(*range(8)), math.inf) == (4, 4 * BLOCK_BYTES)
    assert manager.pin("late", keys(6), math.inf) == (0, 0)
    assert manager.pin("same", keys(0, 1, 7), math.inf) == (2, 2 * BLOCK_BYTES)  # kept already
    assert manager.stats()["cpu"].pinned_blocks == 4
    fill(planner, range(10, 30))  # the other half goes on taking blocks
    assert held(planner, range(10)) == [0, 1, 2, 3]
    assert manager.stats()["cpu"].failed_blocks == 0
    manager.check()


def test_what_two_names_keep_stays_until_both_let_go(cpu: CpuTier) -> None:
    planner = Planner(cpu)
    manager = planner.manager
    fill(planner, range(3))
    manager.pin("a", keys(0, 1), math.inf)
    manager.pin("b", keys(0, 2), math.inf)
    assert manager.pin("a", keys(1), math.inf) == (1, BLOCK_BYTES)  # in place of its first
    manager.unpin("b")
    fill(planner, range(10, 30))
    assert held(planner, range(10)) == [1]


def test_a_pin_lapses_by_itself(cpu: CpuTier, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("offload.manager.time.time", lambda: now[0])
    planner = Planner(cpu)
    fill(planner, range(3))
    planner.manager.pin("short", keys(0), 1010.0)
    planner.manager.pin("long", keys(1), 1020.0)
    planner.manager.pin("past", keys(2), 1000.0)
    assert planner.manager.stats()["cpu"].pinned_blocks == 2
    now[0] = 1009.9
    fill(planner, range(10, 30))
    assert held(planner, range(10)) == [0, 1]
    now[0] = 1010.0
    fill(planner, range(30, 50))
    assert held(planner, range(10)) == [1]
    assert planner.manager.unpin("short") == (0, 0)
    now[0] = 1020.0
    assert planner.manager.stats()["cpu"].pinned_blocks == 0
    planner.manager.check()


def test_the_lapse_of_a_chain_leaves_its_root_for_last(cpu: CpuTier) -> None:
    planner = Planner(cpu)
    fill(planner, range(8))
    planner.manager.pin("chat", keys(0, 1, 2), math.inf)
    planner.manager.unpin("chat")
    assert cpu.present() == keys(3, 4, 5, 6, 7, 2, 1, 0)


def test_every_tier_keeps_what_it_holds(open_disk: OpenDisk) -> None:
    cpu = CpuTier(8 * BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    disk = open_disk(12 * RECORD_BYTES)
    planner = Planner(cpu, disk)
    fill(planner, range(3))
    blocks, num_bytes = planner.manager.pin("chat", keys(0, 1, 2), math.inf)
    assert (blocks, num_bytes) == (3, 3 * BLOCK_BYTES + 3 * RECORD_BYTES)
    fill(planner, range(10, 40))
    assert planner.manager.stats()["disk"].evicted_blocks > 10
    assert [disk.state(key(number)).value for number in range(3)] == ["present"] * 3
    assert held(planner, range(10)) == [0, 1, 2]
    planner.manager.check()


async def test_no_pin_survives_a_reset(cpu: CpuTier, open_disk: OpenDisk) -> None:
    disk = open_disk()
    planner = Planner(cpu, disk)
    manager = planner.manager
    fill(planner, range(2))
    manager.pin("chat", keys(0, 1), math.inf)
    assert await manager.reset(["cpu", "disk"]) == {"cpu": 2, "disk": 2}
    assert held(planner, range(2)) == []
    assert manager.stats()["cpu"].pinned_blocks == manager.stats()["disk"].pinned_blocks == 0
    manager.check()
    fill(planner, range(2))  # the same blocks, but nobody has pinned these
    assert manager.unpin("chat") == (0, 0)
    manager.check()
    fill(planner, range(10, 30))
    assert cpu.present() == keys(*range(22, 30))


def test_no_pin_survives_a_failed_verification_or_a_restart(
    open_disk: OpenDisk, store: Path
) -> None:
    planner = Planner(open_disk())
    fill(planner, range(2))
    planner.manager.pin("chat", keys(0, 1), math.inf)
    path = block_path(store, 0)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    assert planner.load(0) is None
    planner.until(lambda: not path.exists())
    planner.settle()
    assert planner.manager.stats()["disk"].pinned_blocks == 1
    assert planner.manager.unpin("chat") == (1, RECORD_BYTES)
    planner.manager.pin("chat", keys(1), math.inf)
    planner.manager.check()
    assert Planner(open_disk()).manager.stats()["disk"].pinned_blocks == 0


def test_a_pin_does_not_outlive_its_file(open_disk: OpenDisk, store: Path) -> None:
    disk = open_disk()
    planner = Planner(disk)
    fill(planner, range(2))
    planner.manager.pin("chat", keys(0, 1), math.inf)
    block_path(store, 0).unlink()
    disk.absorb(disk.survey(disk.begin_survey()))
    assert planner.manager.stats()["disk"].pinned_blocks == 1
    planner.manager.check()
    assert [fate.what for fate in planner.manager.fate(key(0))] == [LOST]


def test_a_pinned_block_that_is_read_is_counted_once(cpu: CpuTier) -> None:
    planner = Planner(cpu)
    fill(planner, range(2))
    planner.manager.load(key(0), 40)
    planner.manager.pin("chat", keys(0, 1), math.inf)
    assert planner.manager.stats()["cpu"].pinned_blocks == 2
    planner.manager.unpin("chat")
    assert planner.manager.stats()["cpu"].pinned_blocks == 1
    planner.settle()
    assert planner.manager.stats()["cpu"].pinned_blocks == 0
    planner.manager.check()


def test_a_branch_that_was_left_goes_first_unless_it_is_pinned(
    cpu: CpuTier, open_disk: OpenDisk
) -> None:
    disk = open_disk(12 * RECORD_BYTES)
    planner = Planner(cpu, disk)
    fill(planner, range(8))
    planner.manager.pin("fork", keys(5), math.inf)
    planner.manager.age(keys(4, 5, 6, 7))
    assert cpu.present()[:3] == disk.present()[:3] == keys(7, 6, 4)
    fill(planner, range(10, 12))
    assert cpu.present() == keys(4, 0, 1, 2, 3, 10, 11, 5)
    fates = [(fate.tier, fate.what) for fate in planner.manager.fate(key(7))]
    assert ("cpu", SUPERSEDED) in fates
    planner.manager.age(keys(99))  # held nowhere: nothing
    planner.manager.check()


def test_a_full_tier_of_strangers_does_not_outlast_a_left_branch(open_disk: OpenDisk) -> None:
    other = Planner(open_disk(fingerprint=b"o" * 32))
    fill(other, range(4))
    disk = open_disk(12 * RECORD_BYTES)
    planner = Planner(disk)
    fill(planner, range(3))
    planner.manager.age(keys(1, 2))
    evicted, strangers, _ = disk._choose_victims(3 * RECORD_BYTES)
    assert [entry.key for entry in evicted] == keys(2, 1)
    assert len(strangers) == 1  # older than what is left of ours


def test_fates_tell_evicted_from_reset_failed_and_lost(open_disk: OpenDisk, store: Path) -> None:
    cpu = CpuTier(2 * BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    disk = FaultyTier(open_disk())
    planner = Planner(cpu, disk)
    manager = planner.manager

    def fates(number: int) -> set[tuple[str, str]]:
        return {(fate.tier, fate.what) for fate in manager.fate(key(number))}

    fill(planner, range(3))
    assert fates(0) == {("cpu", EVICTED)}
    assert fates(1) == set()
    manager.withdraw(key(1))
    manager.withdraw(key(2), RESET)
    assert (fates(1), fates(2)) == ({("device", EVICTED)}, {("device", RESET)})
    path = block_path(store, 0)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert planner.load(0) is None
    assert fates(0) == {("cpu", EVICTED), ("disk", FAILED_VERIFICATION)}
    disk.faults["write"] = OSError(28, "full")
    fill(planner, range(5, 6))
    assert fates(5) == {("disk", SAVE_FAILED)}


async def test_what_a_reset_drops_is_told_as_reset(open_disk: OpenDisk) -> None:
    disk = FaultyTier(open_disk())
    cpu = CpuTier(4 * BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    planner = Planner(cpu, disk, staging_bytes=2 * BLOCK_BYTES, io_threads=2)
    manager = planner.manager
    fill(planner, range(1))
    disk.hanging.add("write")
    planner.commit(1)
    planner.round()  # its write is under way
    planner.commit(2)
    planner.commit(3)
    resetting = manager.reset(["disk"])
    disk.hanging.clear()
    disk.release.set()
    await resetting
    for number in range(4):
        fates = {(fate.tier, fate.what) for fate in manager.fate(key(number))}
        assert fates == {("disk", RESET)}, number
    manager.check()


async def test_a_reset_of_memory_loses_what_was_still_to_be_saved_from_it(
    open_disk: OpenDisk,
) -> None:
    disk = FaultyTier(open_disk())
    disk.hanging.add("write")
    cpu = CpuTier(8 * BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    planner = Planner(cpu, disk, staging_bytes=2 * BLOCK_BYTES, io_threads=2, stall_seconds=0.0)
    manager = planner.manager
    for number in range(6):
        planner.commit(number)
    planner.round()
    planner.round()
    for number in range(6):
        manager.withdraw(key(number))
    waiting = [number for number in range(6) if key(number) in manager._lanes[1].pending]
    assert waiting  # put off, and only memory has them
    await manager.reset(["cpu"])
    assert not manager._lanes[1].pending  # at once, though the disk hangs
    for number in waiting:
        assert ("disk", LOST) in {(f.tier, f.what) for f in manager.fate(key(number))}
    assert manager.stats()["disk"].skipped == {"put off, then lost": len(waiting)}
    disk.release.set()
    planner.settle()
    manager.check()


def test_a_save_put_off_until_memory_gave_the_block_up_is_lost(open_disk: OpenDisk) -> None:
    disk = FaultyTier(open_disk())
    disk.hanging.add("write")
    cpu = CpuTier(2 * BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    planner = Planner(cpu, disk, staging_bytes=2 * BLOCK_BYTES, io_threads=2)
    manager = planner.manager
    for number in range(6):
        planner.commit(number)
        planner.round()
        manager.withdraw(key(number))
    disk.release.set()
    planner.settle()
    lost = {
        number
        for number in range(6)
        if ("disk", LOST) in {(fate.tier, fate.what) for fate in manager.fate(key(number))}
    }
    assert lost == {number for number in range(6) if disk.state(key(number)).value == "absent"}
    assert len(lost) == manager.stats()["disk"].skipped["put off, then lost"] > 0


def test_the_share_leaves_room_for_new_blocks() -> None:
    assert PIN_SHARE == 0.5
    tier = CpuTier(BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    planner = Planner(tier)
    fill(planner, range(1))
    assert planner.manager.pin("all", keys(0), math.inf) == (0, 0)  # it has only the one
    fill(planner, range(1, 3))
    assert tier.present() == keys(2)
