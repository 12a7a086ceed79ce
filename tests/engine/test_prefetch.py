"""Blocks brought nearer ahead of a turn, and what that may never disturb."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from engine.block_hash import chain_hashes, root_hash
from engine.load_samples import LoadSamples
from offload.disk_tier import DiskTier
from offload.tier import BlockKey, BlockMeta
from tests.engine.planned_engine import BLOCK_BYTES, PlannedEngine, cpu, saved
from tests.engine.planning import BLOCK_SIZE, FINGERPRINT, make_request, run_to_end
from tests.offload.harness import FaultyTier

NUM_BLOCKS = 10
PROMPT = list(range(NUM_BLOCKS * BLOCK_SIZE + 1))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    """Holds the ten blocks of the prompt, of an earlier run."""
    tier = DiskTier.open(
        tmp_path / "store", fingerprint=FINGERPRINT, block_bytes=BLOCK_BYTES, capacity_bytes=1 << 24
    )
    asyncio.run(Engine([tier]).serve(make_request(PROMPT, max_tokens=1)))
    yield tier
    tier.close()


class Engine(PlannedEngine):
    """One that knows the blocks of the prompt."""

    keys: ClassVar = [
        BlockKey(value, 0) for value in chain_hashes(root_hash(FINGERPRINT), PROMPT, BLOCK_SIZE)
    ]

    async def blocks(self) -> list[tuple[BlockKey, BlockMeta]]:
        metas = await self.kv.offload.inquiry.metas(self.keys)
        return [(key, metas[key]) for key in self.keys]

    async def prefetch(self) -> int:
        async with self.running():
            return await self.prefetcher.run(await self.blocks())

    def places(self) -> list[str | None]:
        return [self.kv.nearest(key) for key in self.keys]


async def test_blocks_come_to_the_device_and_the_next_turn_hits_them(disk: DiskTier) -> None:
    engine = Engine([disk])
    assert engine.places() == ["disk"] * 10
    assert await engine.prefetch() == 10
    assert engine.places() == ["device"] * 10
    request = make_request(PROMPT, max_tokens=1)
    engine.scheduler.add(request)
    run_to_end(engine.scheduler)
    assert request.cached.device == 10 * BLOCK_SIZE
    assert await engine.prefetch() == 0  # none can come nearer


async def test_what_a_prefetch_loads_is_drawn_for_an_audit_like_any_load(disk: DiskTier) -> None:
    samples = LoadSamples(1.0, 0, BLOCK_SIZE)
    engine = Engine([disk], samples=samples)
    assert await engine.prefetch() == 10
    drawn = [sample for _ in range(len(samples)) for sample in samples.take()]
    assert [
        (one.key, one.index, one.root_hash, list(one.token_ids), one.tier) for one in drawn
    ] == [
        (key, index, root_hash(FINGERPRINT), PROMPT[: 10 * BLOCK_SIZE], "disk")
        for index, key in enumerate(engine.keys)
    ]
    assert [one.block_id for one in drawn] == [engine.kv.pool.lookup(key) for key in engine.keys]


@pytest.mark.parametrize("is_lie", [False, True])
async def test_behind_a_gap_or_a_lie_nothing_is_drawn(disk: DiskTier, is_lie: bool) -> None:
    samples = LoadSamples(1.0, 0, BLOCK_SIZE)
    engine = Engine([disk], samples=samples)
    blocks = await engine.blocks()
    key, meta = blocks.pop(4)
    if is_lie:
        blocks.insert(4, (key, replace(meta, token_ids=meta.token_ids[::-1])))
    async with engine.running():
        assert await engine.prefetcher.run(blocks) == len(blocks)
    assert [one.index for _ in range(len(samples)) for one in samples.take()] == [0, 1, 2, 3]


async def test_the_device_gives_half_of_what_nobody_uses_and_memory_takes_the_rest(
    disk: DiskTier,
) -> None:
    engine = Engine([cpu(12), disk], num_blocks=8)
    assert await engine.prefetch() == 10
    assert engine.places() == ["device"] * 4 + ["cpu"] * 6
    # On the way to the device they came through memory, too: promotion costs nothing.
    assert engine.kv.offload.stats()["cpu"].blocks == 10


async def test_memory_gives_half_of_itself(disk: DiskTier) -> None:
    engine = Engine([cpu(8), disk], num_blocks=2)
    assert await engine.prefetch() == 5
    assert engine.places() == ["device"] + ["cpu"] * 4 + ["disk"] * 5


async def test_running_requests_keep_what_they_use_and_will_grow_into(disk: DiskTier) -> None:
    engine = Engine([disk], num_blocks=9)
    request = make_request(5 * BLOCK_SIZE, max_tokens=8)
    engine.scheduler.add(request)
    engine.scheduler.schedule()
    table = [list(table) for table in request.block_tables]
    assert await engine.prefetch() == 1  # of four, one is for the next token's block
    assert request.block_tables == table
    assert engine.scheduler.num_preemptions == 0


async def test_while_somebody_waits_the_device_is_left_alone(disk: DiskTier) -> None:
    engine = Engine([cpu(20), disk])
    engine.scheduler.waiting.append(make_request(3))
    assert await engine.prefetch() == 10
    assert engine.places() == ["cpu"] * 10


async def test_the_root_outlives_the_tail(disk: DiskTier) -> None:
    engine = Engine([disk], num_blocks=20)
    assert await engine.prefetch() == 10
    for _ in range(11):
        engine.kv.pool.allocate()  # ten hold nothing, so one is taken from the chain
    assert engine.places() == ["device"] * 9 + ["disk"]


async def test_what_the_device_has_of_a_chain_does_not_make_way_for_the_rest(
    disk: DiskTier,
) -> None:
    engine = Engine([disk], num_blocks=14)
    await engine.serve(make_request(PROMPT[: 3 * BLOCK_SIZE + 1], max_tokens=1))
    await engine.serve(make_request(11 * BLOCK_SIZE, max_tokens=1))  # newer, and warm as well
    assert engine.places() == ["device"] * 3 + ["disk"] * 7
    assert await engine.prefetch() == 7
    assert engine.places() == ["device"] * 10


async def test_a_request_joins_a_prefetch_under_way(disk: DiskTier) -> None:
    slow = FaultyTier(disk)
    engine = Engine([slow])
    blocks = await engine.blocks()
    slow.hanging.add("read")
    task = asyncio.create_task(engine.prefetcher.run(blocks))
    await asyncio.sleep(0)
    request = make_request(PROMPT, max_tokens=1)
    engine.scheduler.add(request)
    engine.scheduler.schedule()
    assert len(request.pending_loads) == 10
    assert engine.kv.pool.num_available == 64 - 11  # no block twice
    slow.release.set()
    async with engine.running():
        assert await task == 10
    run_to_end(engine.scheduler)
    assert request.cached.disk == 10 * BLOCK_SIZE


async def test_a_request_that_leaves_does_not_stop_the_prefetch(disk: DiskTier) -> None:
    slow = FaultyTier(disk)
    engine = Engine([slow])
    blocks = await engine.blocks()
    slow.hanging.add("read")
    task = asyncio.create_task(engine.prefetcher.run(blocks))
    await asyncio.sleep(0)
    request = make_request(PROMPT, max_tokens=1)
    engine.scheduler.add(request)
    engine.scheduler.schedule()
    engine.scheduler.finish(request)
    engine.kv.check([])
    slow.release.set()
    async with engine.running():
        assert await task == 10
    assert engine.places() == ["device"] * 10


async def test_cancelled_it_holds_its_blocks_until_a_copy_has_stopped(disk: DiskTier) -> None:
    engine = Engine([disk])
    kv = engine.kv
    task = asyncio.create_task(engine.prefetcher.run(await engine.blocks()))
    await asyncio.sleep(0)
    while not (transfers := kv.offload.poll()).copies_in:
        await asyncio.sleep(0.001)
    kv.loads.copying(transfers.copies_in)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    held = kv.pool.num_blocks - kv.pool.num_available
    assert held == len(transfers.copies_in) > 0  # these are being written, the others are free
    kv.offload.copied_in(transfers.copies_in)
    for copy in transfers.copies_in:
        kv.loads.loaded(copy.ticket)
    kv.check([])
    await saved(engine.scheduler)
    assert kv.pool.num_available == kv.pool.num_blocks
    assert engine.places().count("device") == held  # what came is what it claims to be


@pytest.mark.parametrize("num_blocks", [64, 2])
async def test_a_disk_that_fails_or_an_engine_that_dies_ends_it(
    disk: DiskTier, num_blocks: int
) -> None:
    faulty = FaultyTier(disk)
    engine = Engine([cpu(20), faulty], num_blocks=num_blocks)
    blocks = await engine.blocks()
    faulty.hanging.add("read")
    task = asyncio.create_task(engine.prefetcher.run(blocks))
    await asyncio.sleep(0)
    engine.is_alive = False
    assert await task == 0
    faulty.faults["read"] = OSError(5, "EIO")
    faulty.release.set()
    engine.is_alive = True
    await saved(engine.scheduler)
    engine.kv.check([])
    assert engine.kv.pool.num_available == num_blocks
    async with engine.running():
        assert await engine.prefetcher.run(blocks) == 0
    engine.kv.check([])
    assert engine.kv.pool.num_available == num_blocks
