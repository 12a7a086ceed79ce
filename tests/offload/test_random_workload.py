"""Random offers, loads, cancellations, resets and faults: the laws hold after every step, and what
is loaded is what was stored."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Callable

import pytest

from offload.cpu_tier import CpuTier
from offload.disk_tier import DiskTier
from tests.offload.harness import (
    BLOCK_BYTES,
    RECORD_BYTES,
    FaultyTier,
    Planner,
    content,
    key,
    physical_bytes,
)

NUM_KEYS = 80
CAPACITY = 40 * RECORD_BYTES
FAULTS = [OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "bad"), RuntimeError("bug")]


class Workload:
    """Device blocks 0..39 hold committed blocks, 40.. are where loads go."""

    def __init__(self, seed: int, cpu: CpuTier, disk: FaultyTier) -> None:
        self.rng = random.Random(seed)
        self.disk = disk
        self.planner = Planner(cpu, disk, staging_bytes=6 * BLOCK_BYTES, survey_seconds=0.01)
        self.resident: dict[int, int] = {}  # device block -> number
        self.loads: dict[int, tuple[int, int]] = {}  # ticket -> number, device block
        self.num_loaded = 0

    def commit(self) -> None:
        block_id, number = self.rng.randrange(40), self.rng.randrange(NUM_KEYS)
        if number in self.resident.values():
            return
        if block_id in self.resident:
            self.planner.manager.withdraw(key(self.resident.pop(block_id)))
        self.resident[block_id] = number
        self.planner.commit(number, block_id)

    def load(self) -> None:
        number = self.rng.randrange(NUM_KEYS)
        free = set(range(40, 64)) - {block_id for _, block_id in self.loads.values()}
        if free and self.planner.manager.lookup(key(number)):
            block_id = min(free)
            self.loads[self.planner.manager.load(key(number), block_id)] = number, block_id

    def cancel(self) -> None:
        if self.loads:
            ticket = self.rng.choice(list(self.loads))
            self.planner.manager.cancel(ticket)
            del self.loads[ticket]

    def touch(self) -> None:
        self.planner.manager.touch([key(self.rng.randrange(NUM_KEYS)) for _ in range(5)])

    def fault(self) -> None:
        self.disk.faults = {
            call: self.rng.choice(FAULTS) for call in ("read", "write") if self.rng.random() < 0.3
        }

    def round(self) -> None:
        planner = self.planner
        planner.loaded.clear()
        planner.failed.clear()
        planner.round()
        assert set(planner.loaded) | set(planner.failed) <= set(self.loads)
        for ticket in planner.loaded:
            number, block_id = self.loads.pop(ticket)
            assert planner.device[block_id] == content(number)
            self.num_loaded += 1
        for ticket in planner.failed:
            del self.loads[ticket]


@pytest.mark.parametrize("seed", range(3))
async def test_random_workload(seed: int, open_disk: Callable[..., DiskTier]) -> None:
    cpu = CpuTier(12 * BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    work = Workload(seed, cpu, FaultyTier(disk := open_disk(CAPACITY)))
    actions = [work.commit] * 6 + [work.load] * 4 + [work.cancel, work.touch, work.fault]
    for step in range(400):
        work.rng.choice(actions)()
        work.planner.manager.check()
        if work.rng.random() < 0.5:
            work.round()
        if step % 150 == 149:
            tiers = work.rng.choice([["cpu"], ["disk"], ["cpu", "disk"]])
            await work.planner.manager.reset(tiers)
    work.disk.faults = {}
    while not work.planner.manager.idle():
        work.round()
        await asyncio.sleep(0.001)
    assert work.loads == {}
    assert work.num_loaded >= 10
    stats = work.planner.manager.stats()
    assert stats["cpu"].pinned_blocks == stats["disk"].pinned_blocks == 0
    assert stats["cpu"].pending_saves == stats["disk"].pending_saves == 0
    assert work.planner.manager._staging.num_free == work.planner.manager._staging.num_buffers
    assert physical_bytes(disk._directory._path) <= CAPACITY
    stored = set(open_disk(CAPACITY).present())
    assert set(disk.present()) <= stored
