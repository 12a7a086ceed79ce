"""Chains that are forgotten, and blocks that expire, are never served again."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from offload.cpu_tier import CpuTier
from offload.disk_tier import DiskTier
from offload.store_scan import block_name
from offload.tier import BlockKey, BlockState, Forget, OffloadError
from tests.offload.harness import (
    BLOCK_BYTES,
    FINGERPRINT,
    FaultyTier,
    Planner,
    content,
    key,
    meta,
    named,
    physical_bytes,
    root,
)

OpenDisk = Callable[..., DiskTier]
MALLORY = root("mallory")
FORGET = Forget(roots=frozenset({MALLORY}))


def theirs(number: int) -> BlockKey:
    return key(1000 + number)


class Tenants(Planner):
    """Blocks 0.. of the chain of nobody, and as many of mallory's."""

    def commit_theirs(self, number: int) -> BlockKey:
        block_id = 32 + number
        self.device[block_id][:] = content(1000 + number)
        self.manager.offer(theirs(number), meta(1000 + number, "mallory"), block_id)
        return theirs(number)

    def commit_both(self, numbers: range) -> None:
        for number in numbers:
            self.commit(number)
            self.commit_theirs(number)

    async def forget(self, *tiers: str, where: Forget = FORGET) -> dict[str, int]:
        return await self.manager.reset(tiers, where)


async def test_one_chain_is_forgotten_in_every_tier_and_for_ever(
    cpu: CpuTier, open_disk: OpenDisk, store: Path
) -> None:
    planner = Tenants(cpu, open_disk())
    planner.commit_both(range(4))
    planner.settle()
    assert await planner.forget("cpu", "disk") == {"cpu": 4, "disk": 4}
    for number in range(4):
        assert planner.manager.lookup(theirs(number)) is None
        assert planner.load(number, 63, "disk") == content(number)
    planner.settle()
    again = open_disk()
    assert set(again.present()) == {key(number) for number in range(4)}
    assert not list(store.rglob(f"*.{MALLORY.hex()[:16]}.*"))
    assert again._used_bytes == physical_bytes(store)
    planner.commit_theirs(1)  # computed anew: the tiers take it at once
    planner.settle()
    assert planner.manager.lookup(theirs(1)) == "cpu"
    assert open_disk().state(theirs(1)) is BlockState.PRESENT


async def test_single_blocks_are_forgotten(cpu: CpuTier, open_disk: OpenDisk) -> None:
    planner = Tenants(cpu, open_disk())
    planner.commit_both(range(2))
    planner.settle()
    where = Forget(keys=frozenset({key(1), theirs(0)}))
    assert await planner.forget("disk", where=where) == {"disk": 2}
    assert set(open_disk().present()) == {key(0), theirs(1)}
    assert set(cpu.present()) == {key(0), key(1), theirs(0), theirs(1)}  # not asked for


async def test_what_is_queued_or_being_written_is_forgotten(
    cpu: CpuTier, open_disk: OpenDisk
) -> None:
    disk = FaultyTier(open_disk())
    disk.hanging.add("write")
    planner = Tenants(cpu, disk, io_threads=4)
    planner.commit_both(range(4))
    planner.until(lambda: disk.calls.count("write") == 3)  # the threads that save; five wait
    forgetting = asyncio.create_task(planner.forget("cpu", "disk"))
    await asyncio.sleep(0)
    disk.hanging.clear()
    disk.release.set()
    await forgetting
    planner.settle()
    expected = {key(number) for number in range(4)}
    assert set(cpu.present()) == set(disk.present()) == set(open_disk().present()) == expected
    await planner.manager.flush(planner.pump)
    assert set(open_disk().present()) == expected


async def test_a_block_published_while_it_is_forgotten_gets_no_name(
    open_disk: OpenDisk, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forgotten, durably, between the write and the name: the name is refused."""
    tier = open_disk()
    fdatasync, asked, go = os.fdatasync, threading.Event(), threading.Event()

    def slow(fd: int) -> None:
        fdatasync(fd)
        asked.set()
        assert go.wait(10)

    monkeypatch.setattr(os, "fdatasync", slow)
    planner = Tenants(tier)
    planner.commit_theirs(1)
    planner.until(asked.is_set)
    assert await planner.forget("disk") == {"disk": 0}
    go.set()
    planner.until(lambda: planner.manager._saves.num_buffers == 0)  # the write has ended
    assert (tier.present(), open_disk().present()) == ([], [])
    assert not list(store.rglob("*.kv")) + list(store.rglob(".tmp.*"))


async def test_loads_of_a_forgotten_chain_fail_and_others_go_on(
    cpu: CpuTier, open_disk: OpenDisk
) -> None:
    disk = FaultyTier(open_disk())
    planner = Tenants(cpu, disk)
    planner.commit_both(range(1))
    planner.settle()
    await planner.manager.reset(["cpu"])
    disk.hanging.add("read")
    tickets = [planner.manager.load(wanted, 60 + i) for i, wanted in enumerate((theirs(0), key(0)))]
    planner.until(lambda: disk.calls.count("read") == 2)
    forgetting = asyncio.create_task(planner.forget("cpu", "disk"))
    await asyncio.sleep(0)
    disk.hanging.clear()
    disk.release.set()
    await forgetting
    planner.settle()
    assert (planner.failed, planner.loaded) == ([tickets[0]], [tickets[1]])
    assert cpu.present() == [key(0)]  # a promotion under way is forgotten too
    planner.manager.check()


async def test_an_eviction_that_fails_does_not_bring_a_forgotten_block_back(
    open_disk: OpenDisk,
) -> None:
    tier = open_disk()
    planner = Tenants(tier)
    planner.commit_theirs(1)
    planner.settle()
    entry = tier.pin(theirs(1))
    tier.unpin(entry)
    assert tier.condemn(entry) == 0  # EVICTING
    assert await planner.forget("disk") == {"disk": 0}
    assert open_disk().present() == []
    tier.removed(entry, tier.remove(entry, 0))
    tier.check()


async def test_a_survey_begun_before_does_not_bring_it_back(open_disk: OpenDisk) -> None:
    tier, other = open_disk(), open_disk()
    planner = Tenants(other)
    planner.commit_both(range(2))
    planner.settle()
    survey = tier.survey(tier.begin_survey())
    assert len(survey.found) == 4
    tier.drop(FORGET)
    tier.absorb(survey)
    assert tier.present() == []
    tier.absorb(tier.survey(tier.begin_survey()))
    assert len(tier.present()) == 4  # it was not erased in this test


async def test_a_forgotten_chain_that_cannot_be_erased_is_told_and_stays_out(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_disk()
    planner = Tenants(tier)
    planner.commit_both(range(2))
    planner.settle()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        with pytest.raises(OffloadError, match="a restart may find its old blocks"):
            await planner.forget("disk")
    tier.absorb(tier.survey(tier.begin_survey()))
    assert set(tier.present()) == {key(0), key(1)}
    planner.commit_theirs(0)
    planner.settle()
    assert set(tier.present()) == {key(0), key(1), theirs(0)}


async def test_once_it_could_be_erased_what_others_store_of_it_is_taken_up(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_disk()
    planner = Tenants(tier)
    planner.commit_both(range(2))
    planner.settle()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    both = Forget(roots=frozenset({MALLORY, root("else")}), keys=frozenset({theirs(3)}))
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        with pytest.raises(OffloadError):
            await planner.forget("disk", where=both)
    assert await planner.forget("disk") == {"disk": 0}
    sibling = Tenants(open_disk())
    for number in range(4):
        sibling.commit_theirs(number)
    sibling.settle()
    tier.absorb(tier.survey(tier.begin_survey()))
    expected = {key(0), key(1), theirs(0), theirs(1), theirs(2)}
    assert set(tier.present()) == expected  # of the other try, one block is left to be erased
    await planner.forget("disk", where=both)
    sibling.commit_theirs(4)
    sibling.settle()
    tier.absorb(tier.survey(tier.begin_survey()))
    assert set(tier.present()) == {key(0), key(1), theirs(4)}


async def test_erasing_is_durable_before_it_is_reported(
    open_disk: OpenDisk, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_disk()
    planner = Tenants(tier)
    planner.commit_both(range(1))
    planner.settle()
    steps: list[str] = []
    unlink, fsync = os.unlink, os.fsync

    def note_unlink(path: str, *, dir_fd: int | None = None) -> None:
        steps.append(f"unlink {path[:4]}")
        unlink(path, dir_fd=dir_fd)

    def note_fsync(fd: int) -> None:
        steps.append(f"fsync {os.path.basename(os.readlink(f'/proc/self/fd/{fd}'))[:4]}")
        fsync(fd)

    monkeypatch.setattr(os, "unlink", note_unlink)
    monkeypatch.setattr(os, "fsync", note_fsync)
    await planner.forget("disk")
    digits = theirs(0).block_hash.hex()
    assert steps[0] == f"unlink {digits[:4]}"
    assert steps[1].startswith(f"fsync {digits[:2]}")
    assert steps[2] == f"fsync {FINGERPRINT.hex()[:4]}"


async def test_a_reset_disk_is_not_filled_by_what_was_on_its_way_into_memory(
    cpu: CpuTier, open_disk: OpenDisk
) -> None:
    """A block leaves the device while its copy into the CPU tier is under way."""
    disk = open_disk()
    planner = Planner(cpu, disk)
    planner.commit(1)
    transfers = planner.manager.poll()
    assert len(transfers.copies_out) == 1
    planner.manager.withdraw(key(1))
    resetting = asyncio.create_task(planner.manager.reset(["disk"]))
    await asyncio.sleep(0)
    planner.execute(transfers)
    await resetting
    planner.settle()
    assert cpu.present() == [key(1)]  # that tier was not reset
    await planner.manager.flush(planner.pump)
    assert (disk.present(), open_disk().present()) == ([], [])


class Clock:
    """Seconds since the epoch, as the test says."""

    def __init__(self) -> None:
        self.now = 2e9

    def __call__(self) -> float:
        return self.now


def open_with_ttl(store: Path, clock: Clock, ttl: float = 100.0) -> DiskTier:
    return DiskTier.open(
        store,
        fingerprint=FINGERPRINT,
        block_bytes=BLOCK_BYTES,
        capacity_bytes=1 << 24,
        ttl_seconds=ttl,
        clock=clock,
    )


def test_a_block_unused_for_longer_than_the_ttl_is_none(store: Path) -> None:
    clock = Clock()
    tier = open_with_ttl(store, clock)
    planner = Planner(tier)
    for number in range(4):
        planner.commit(number)
    planner.settle()
    clock.now += 60
    tier.touch(key(1))
    pinned = tier.pin(key(2))
    clock.now += 41
    assert [planner.manager.lookup(key(n)) for n in range(4)] == [None, "disk", "disk", None]
    with pytest.raises(KeyError):
        planner.manager.load(key(0), 0, "disk")
    tier.unpin(pinned)
    assert tier.state(key(2)) is BlockState.ABSENT
    assert tier.usage().skipped["expired"] == 3
    tier.absorb(tier.survey(tier.begin_survey()))
    files = {path.name for path in store.rglob("*.kv")}
    assert files == {block_name(named(1))[1]}
    assert tier._used_bytes == physical_bytes(store)
    planner.commit(0)  # computed anew
    planner.settle()
    assert planner.load(0) == content(0)
    planner.manager.check()
    tier.close()


def test_the_ttl_holds_over_a_restart(store: Path) -> None:
    clock = Clock()
    tier = open_with_ttl(store, clock)
    planner = Planner(tier)
    for number in range(3):
        planner.commit(number)
    planner.settle()
    clock.now += 50
    tier.touch(key(2))
    for number, age in ((0, 101.0), (1, 99.0)):
        path = store / FINGERPRINT.hex() / "/".join(block_name(named(number)))
        os.utime(path, (clock.now - age, clock.now - age))
    tier.absorb(tier.survey(tier.begin_survey()))  # records what was used when
    tier.close()
    again = open_with_ttl(store, clock)
    assert set(again.present()) == {key(1), key(2)}
    assert len(list(store.rglob("*.kv"))) == 2
    again.close()
    clock.now += 10
    again = open_with_ttl(store, clock, ttl=0)
    assert set(again.present()) == {key(1), key(2)}  # without a limit nothing expires
    again.close()


def test_an_idle_planner_is_told_when_to_look_for_what_expired(store: Path) -> None:
    clock = Clock()
    tier = open_with_ttl(store, clock)
    planner = Planner(tier, survey_seconds=7.0)
    wait = planner.manager.next_look()
    assert wait is not None
    assert 6.0 < wait <= 7.0
    assert Planner(CpuTier(1 << 20, block_bytes=BLOCK_BYTES)).manager.next_look() is None
    tier.close()


def test_a_block_that_expires_after_it_was_found_is_still_loaded(store: Path) -> None:
    clock = Clock()
    tier = open_with_ttl(store, clock)
    planner = Planner(tier)
    planner.commit(1)
    planner.settle()
    clock.now += 100
    assert planner.manager.lookup(key(1)) == "disk"
    clock.now += 1
    assert planner.load(1, tier="disk") == content(1)
    assert planner.manager.lookup(key(1)) is None
    planner.manager.check()
    tier.close()


def test_a_pinned_block_does_not_expire(store: Path) -> None:
    clock = Clock()
    tier = open_with_ttl(store, clock)
    planner = Planner(tier)
    for number in range(2):
        planner.commit(number)
    planner.settle()
    assert planner.manager.pin("chat", [key(0)], math.inf)[0] == 1
    clock.now += 101
    tier.absorb(tier.survey(tier.begin_survey()))
    assert tier.present() == [key(0)]
    assert {path.name for path in store.rglob("*.kv")} == {block_name(named(0))[1]}
    assert planner.load(0) == content(0)
    planner.manager.unpin("chat")
    assert planner.manager.lookup(key(0)) is None
    assert tier.usage().skipped["expired"] == 2
    planner.manager.check()
    tier.close()


def test_a_block_that_is_being_evicted_does_not_expire_too(store: Path) -> None:
    clock = Clock()
    tier = open_with_ttl(store, clock)
    planner = Planner(tier)
    planner.commit(1)
    planner.settle()
    entry = tier.pin(key(1))
    tier.unpin(entry)
    epoch = tier.condemn(entry)
    assert epoch is not None
    clock.now += 101
    survey = tier.survey(tier.begin_survey())
    assert "expired" not in tier.usage().skipped
    tier.removed(entry, tier.remove(entry, epoch))
    tier.absorb(survey)
    assert tier.present() == []
    tier.check()
    tier.close()
