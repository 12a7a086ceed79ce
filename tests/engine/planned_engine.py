"""Planner and tiers without a model: passes are instant, copies move nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from engine.kv_cache_manager import KVCacheManager
from engine.kv_groups import KVGroup
from engine.load_samples import LoadSamples
from engine.prefetch import Prefetcher
from engine.request import Request
from engine.scheduler import Scheduler, SchedulerLimits
from offload.cpu_tier import CpuTier
from offload.manager import OffloadManager
from offload.tier import Tier
from tests.engine.planning import BLOCK_SIZE, run_pass

BLOCK_BYTES = 4096


def cpu(num_blocks: int) -> CpuTier:
    return CpuTier(num_blocks * BLOCK_BYTES, block_bytes=BLOCK_BYTES)


async def saved(scheduler: Scheduler) -> None:
    while not scheduler.kv.offload.idle():
        play_round(scheduler)
        await asyncio.sleep(0.001)


def play_round(scheduler: Scheduler) -> None:
    """What one step of the engine does for transfers."""
    offload, loads = scheduler.kv.offload, scheduler.kv.loads
    transfers = offload.poll()
    loads.copying(transfers.copies_in)
    for ticket in transfers.failed_loads:
        for request, index in loads.failed(ticket):
            scheduler.load_failed(request, index)
    offload.copied_out(transfers.copies_out)
    offload.copied_in(transfers.copies_in)
    for copy in transfers.copies_in:
        for request in loads.loaded(copy.ticket):
            if not request.pending_loads:
                scheduler.loads_settled(request)
    scheduler.kv.check(scheduler.live())


class PlannedEngine:
    """A pool, tiers, a scheduler and a prefetcher."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        num_blocks: int = 64,
        groups: Sequence[KVGroup] = (KVGroup(0),),
        samples: LoadSamples | None = None,
    ) -> None:
        offload = OffloadManager(tiers, block_bytes=BLOCK_BYTES)
        self.kv = KVCacheManager(num_blocks, BLOCK_SIZE, offload, groups=groups, samples=samples)
        self.scheduler = Scheduler(SchedulerLimits(4, 64), self.kv)
        self.is_alive = True
        self.prefetcher = Prefetcher(
            self.scheduler, is_alive=lambda: self.is_alive, stall_seconds=5.0
        )

    async def serve(self, request: Request) -> Request:
        """To the end, loads and saves included."""
        self.scheduler.add(request)
        while self.scheduler.live():
            await self.turn()
        await saved(self.scheduler)
        return request

    async def turn(self) -> None:
        """A round of transfers and a pass."""
        play_round(self.scheduler)
        await asyncio.sleep(0)
        run_pass(self.scheduler, self.scheduler.schedule())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async def loop() -> None:
            while True:
                play_round(self.scheduler)
                await asyncio.sleep(0.001)

        task = asyncio.create_task(loop())
        yield
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled(), task.exception()
