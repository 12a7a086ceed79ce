"""Bringing stored blocks nearer ahead of a turn: to the device where there is room, else to memory.

    hit      |-- device --|-- memory --|------- disk -------|
    room                  |-- to the device --|-- to memory --|

It uses what nobody needs. A load holds its device block alone, joins no queue and computes nothing;
a request that comes meanwhile joins the load. Few blocks are in flight at a time, so that a
request's own loads are never far behind in the queue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from engine.block_hash import block_hash
from engine.prefix_match import DEVICE
from engine.request import Request
from engine.scheduler import Scheduler
from offload.tier import BlockHash, BlockKey, BlockMeta

MAX_IN_FLIGHT = 16
# Of the device blocks that nobody references, and of a memory tier's: the rest keeps what it has.
MAX_SHARE = 0.5
_PATIENCE = 0.002  # seconds between looks at loads that the engine loop moves on


class Prefetcher:
    """One prefetch after another or side by side; engine loop only.

    `is_alive` says whether the engine loop still runs: without it no load ends. `stall_seconds` is
    how long a prefetch waits for a tier that does not move.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        is_alive: Callable[[], bool],
        stall_seconds: float,
    ) -> None:
        self._kv = scheduler.kv
        self._scheduler = scheduler
        self._is_alive = is_alive
        self._stall_seconds = stall_seconds

    async def run(self, blocks: Sequence[tuple[BlockKey, BlockMeta]]) -> int:
        """Bring the blocks of a chain nearer, root first; how many now are.

        Returns when all have come, failed, or have no room. Cancelled, it gives up what nobody
        else waits for; a copy under way ends by itself.
        """
        kv = self._kv
        before = {key: kv.nearest(key) for key, _ in blocks}
        # None makes way for another of them.
        kv.offload.touch([key for key, _ in blocks])
        self._keep_roots([key for key, _ in blocks])
        num_room = self._device_room()
        num_memory = int(kv.offload.memory_blocks * MAX_SHARE)
        in_flight: set[int] = set()
        origins = _origins(blocks)
        try:
            for key, meta in blocks:
                source = kv.nearest(key)
                if source in (None, DEVICE):
                    continue
                room = min(num_room, self._device_room())  # requests have grown meanwhile
                if room > 0 and not self._scheduler.waiting:
                    ticket = self._to_device(key, meta, origins.get(key.block_hash))
                    num_room -= 1
                else:
                    num_room = 0  # a prefix is worth what is there without a gap
                    ticket = self._to_memory(key) if num_memory > 0 else None
                    num_memory -= 1
                if ticket is not None:
                    in_flight.add(ticket)
                if not await self._wait(in_flight, MAX_IN_FLIGHT - 1):
                    break
            await self._wait(in_flight, 0)
        finally:
            for ticket in in_flight:
                self._give_up(ticket)
        self._keep_roots([key for key, _ in blocks])
        return sum(_is_nearer(before[key], kv.nearest(key)) for key, _ in blocks)

    def _device_room(self) -> int:
        """What no running request is about to grow into, and nobody waits for."""
        growth = len(self._scheduler.running) * len(self._kv.groups)
        spare = self._kv.pool.num_available - growth
        return max(0, int(spare * MAX_SHARE))

    def _to_device(
        self, key: BlockKey, meta: BlockMeta, origin: tuple[Request, int] | None
    ) -> int | None:
        kv = self._kv
        tier = kv.offload.lookup(key)
        if tier is None or kv.loads.find(key) is not None or not kv.pool.num_available:
            return None
        ticket = kv.loads.prefetch(key, meta, kv.pool.allocate(), tier, origin)
        kv.offload.start_loads()
        return ticket

    def _to_memory(self, key: BlockKey) -> int | None:
        if self._kv.loads.find(key) is not None:
            return None
        ticket = self._kv.offload.promote(key)
        self._kv.offload.start_loads()
        return ticket

    async def _wait(self, in_flight: set[int], most: int) -> bool:
        """Until at most so many are left; False if none has ended for too long."""
        deadline = time.monotonic() + self._stall_seconds
        while True:
            ended = {ticket for ticket in in_flight if not self._in_flight(ticket)}
            in_flight -= ended
            if len(in_flight) <= most:
                return True
            now = time.monotonic()
            if ended:
                deadline = now + self._stall_seconds
            if now > deadline or not self._is_alive():
                return False
            await asyncio.sleep(_PATIENCE)

    def _in_flight(self, ticket: int) -> bool:
        return self._kv.loads.in_flight(ticket) or self._kv.offload.in_flight(ticket)

    def _give_up(self, ticket: int) -> None:
        if self._kv.loads.in_flight(ticket):
            self._kv.loads.give_up(ticket)
        elif self._kv.offload.in_flight(ticket):
            self._kv.offload.cancel(ticket)

    def _keep_roots(self, keys: Sequence[BlockKey]) -> None:
        """Released root first, as they came, the root would go first of all."""
        pool = self._kv.pool
        for key in reversed(keys):
            block_id = pool.lookup(key)
            if block_id is not None:
                pool.reference(block_id)
                pool.release(block_id)


def _origins(
    blocks: Sequence[tuple[BlockKey, BlockMeta]],
) -> dict[BlockHash, tuple[Request, int]]:
    """What computing the blocks anew takes: one request of nobody with the tokens of the chain, and
    where in it each block lies. Only as far as their metas make one chain: behind a gap, and behind
    tokens that are not those of the hash, nobody could say what to compute."""
    parent: BlockHash | None = None
    root: BlockHash | None = None
    token_ids: list[int] = []
    found: list[BlockHash] = []
    for key, meta in blocks:
        if key.block_hash == parent:
            continue  # the same block of another group
        root = root or meta.root_hash
        if block_hash(parent or root, meta.token_ids) != key.block_hash:
            break
        parent = key.block_hash
        token_ids += meta.token_ids
        found.append(parent)
    if root is None:
        return {}
    request = Request.of_nobody("prefetch", token_ids, root)
    return {value: (request, index) for index, value in enumerate(found)}


def _is_nearer(before: str | None, after: str | None) -> bool:
    """From disk to memory or the device, from memory to the device."""
    order = (None, "disk", "cpu", DEVICE)
    return order.index(after) > order.index(before)
