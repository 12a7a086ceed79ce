"""Block tables: matching a prefix, growing, committing and releasing the blocks of a request.

    match    which leading blocks are held, and where (device, a load in flight, a tier)
    admit    take them: reference, start loads, allocate the rest of the known tokens
    grow     room for the next rows
    commit   publish newly full, committed blocks in the prefix map and offer them to the tiers
    release  give everything back, tails first

Planning only: it moves no bytes. Copies and reads happen elsewhere, ordered before the next pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from engine.block_hash import block_hash
from engine.block_pool import BlockPool
from engine.kv_groups import KVGroup
from engine.kv_loads import KVLoads
from engine.outputs import CachedTokens
from engine.request import Request, committed_len
from offload import history
from offload.manager import OffloadManager
from offload.tier import BlockHash, BlockKey, BlockMeta, Forget

DEVICE = "device"


@dataclass(frozen=True, slots=True)
class BlockHit:
    """A leading block that need not be computed. `block_id` is None while no device block is."""

    key: BlockKey
    source: str  # nearest tier that holds it
    block_id: int | None


class KVCacheManager:
    """Owns block pool, loads and the offload manager's view of requests; engine loop only."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        offload: OffloadManager,
        *,
        offload_prompt_only: bool = False,
    ) -> None:
        self.block_size = block_size
        self.group = KVGroup(index=0)
        self.offload = offload
        self.pool = BlockPool(
            num_blocks,
            on_evict=offload.withdraw,
            on_reset=partial(offload.withdraw, what=history.RESET),
        )
        self.loads = KVLoads(self.pool, offload)
        self._offload_prompt_only = offload_prompt_only

    # --- matching ---------------------------------------------------------------------------

    def match(self, request: Request) -> list[BlockHit]:
        """The longest held prefix that leaves at least one known token to compute.

            |-- hit 0 --|-- hit 1 --|-- miss ...      limit = (num_tokens - 1) // block_size

        A request that wants its prompt's logprobs matches nothing: they need every position.
        """
        if request.wants_prompt_logprobs and request.num_output_tokens == 0:
            return []
        hits: list[BlockHit] = []
        for index in range((request.num_tokens - 1) // self.block_size):
            hit = self._find(self._key(request, index))
            if hit is None:
                break
            hits.append(hit)
        return hits

    def _find(self, key: BlockKey) -> BlockHit | None:
        block_id = self.pool.lookup(key)
        if block_id is not None:
            return BlockHit(key, DEVICE, block_id)
        load = self.loads.find(key)
        if load is not None:
            return BlockHit(key, load.tier, load.block_id)
        tier = self.offload.lookup(key)
        return None if tier is None else BlockHit(key, tier, None)

    def num_blocks_for(self, num_positions: int) -> int:
        return -(-num_positions // self.block_size)

    def num_blocks_to_take(self, request: Request, hits: list[BlockHit]) -> int:
        """How many blocks `admit` would move out of the unreferenced set."""
        shared = sum(
            hit.block_id is not None and not self.pool.is_unreferenced(hit.block_id) for hit in hits
        )
        return self.num_blocks_for(request.num_tokens) - shared

    # --- a request's life -------------------------------------------------------------------

    def admit(self, request: Request, hits: list[BlockHit]) -> None:
        """Build the block table for all known tokens; loads it needs are started.

        The caller has checked `num_blocks_to_take` against the pool. Device hits are referenced
        before anything is allocated, so that allocation cannot evict them.
        """
        table = request.block_tables[0]
        assert not table, "admitted twice"
        for hit in hits:
            if hit.block_id is not None:
                self.pool.reference(hit.block_id)
        for index, hit in enumerate(hits):
            block_id = self.pool.allocate() if hit.block_id is None else hit.block_id
            table.append(block_id)
            if hit.source == DEVICE:
                continue
            if hit.block_id is None:
                meta = self._meta(request, index)
                self.loads.start(request, index, hit.key, meta, block_id, hit.source)
            else:
                self.loads.join(request, index, hit.key)
        self.offload.start_loads()
        while len(table) < self.num_blocks_for(request.num_tokens):
            table.append(self.pool.allocate())
        request.num_committed_blocks = request.num_hit_blocks = len(hits)
        on_device = next((i for i, hit in enumerate(hits) if hit.source != DEVICE), len(hits))
        request.num_computed_tokens = on_device * self.block_size

    def loads_settled(self, request: Request) -> None:
        """Every load is verified and in place: the whole hit counts as computed."""
        assert not request.pending_loads
        request.num_computed_tokens = request.num_hit_blocks * self.block_size

    def shorten_hit(self, request: Request, num_blocks: int) -> None:
        """A load failed or is late: keep the first `num_blocks` of the hit, drop all behind.

            |-- kept: on the device or still loading --|-- given up --|
            0                                      num_blocks

        The dropped blocks may be shared, so they are released, never written.
        """
        self.loads.leave(request, num_blocks)
        table = request.block_tables[0]
        for block_id in reversed(table[num_blocks:]):
            self.pool.release(block_id)
        del table[num_blocks:]
        request.num_hit_blocks = min(request.num_hit_blocks, num_blocks)
        request.num_committed_blocks = request.num_hit_blocks
        request.num_computed_tokens = min(request.num_computed_tokens, num_blocks * self.block_size)

    def grow(self, request: Request, num_positions: int) -> bool:
        """Make the table cover `num_positions`; False, with nothing taken, if the pool is short."""
        table = request.block_tables[0]
        missing = self.num_blocks_for(num_positions) - len(table)
        if missing > self.pool.num_available:
            return False
        table.extend(self.pool.allocate() for _ in range(missing))
        return True

    def commit(self, request: Request) -> None:
        """Publish what `committed_len` covers and nothing above it."""
        table = request.block_tables[0]
        num_full = committed_len(request) // self.block_size
        for index in range(request.num_committed_blocks, min(num_full, len(table))):
            request.num_committed_blocks = index + 1
            if index < request.first_cacheable_block:
                continue
            key = self._key(request, index)
            if self.pool.register(key, table[index], request.root_hash) and self._stores(request, index):
                self.offload.offer(key, self._meta(request, index), table[index])

    def touch(self, request: Request, again: bool = False) -> None:
        """Make the committed chain recent in every tier, its root most of all; `again` if the
        request found it."""
        count = request.num_committed_blocks
        hashes = request.block_hashes[:count]
        self.offload.touch([BlockKey(value, self.group.index) for value in hashes], again)

    def release(self, request: Request) -> None:
        """Give back every block, tails first, so that heads outlive them in the prefix map."""
        self.loads.leave(request)
        for block_id in reversed(request.block_tables[0]):
            self.pool.release(block_id)
        request.block_tables = [[]]
        request.num_committed_blocks = request.num_hit_blocks = 0
        request.num_computed_tokens = 0
        request.first_cacheable_block = 0  # what a reset barred is gone; the rest is new

    def _stores(self, request: Request, index: int) -> bool:
        if not self._offload_prompt_only:
            return True
        return index < request.num_prompt_tokens // self.block_size

    # --- the cache as a whole ---------------------------------------------------------------

    def reset(self, live: Iterable[Request], where: Forget | None = None) -> int:
        """Empty the prefix map, or take the blocks of `where` out of it; what live requests have
        computed of these so far never enters it again. How many keys the map lost."""
        for request in live:
            if where is None or self._is_touched(request, where):
                touched = request.num_computed_tokens + request.num_inflight_tokens
                request.first_cacheable_block = self.num_blocks_for(touched)
        self.loads.reset(where)
        return self.pool.reset(where)

    def _is_touched(self, request: Request, where: Forget) -> bool:
        if request.root_hash in where.roots:
            return True
        return any(key in where.keys for key in self.keys(self.begun(request)))

    def begun(self, request: Request) -> list[BlockHash]:
        """The whole blocks of a request that are computed or being computed, root first."""
        touched = request.num_computed_tokens + request.num_inflight_tokens
        num_known = min(touched, request.num_tokens) // self.block_size
        return [self._key(request, index).block_hash for index in range(num_known)]

    def keys(self, hashes: Iterable[BlockHash]) -> list[BlockKey]:
        """The blocks of a chain in every group, root first."""
        return [BlockKey(block_hash, self.group.index) for block_hash in hashes]

    def nearest(self, key: BlockKey) -> str | None:
        """The nearest tier that holds a block or loads it, the device included."""
        hit = self._find(key)
        return None if hit is None else hit.source

    def supersede(self, hashes: Sequence[BlockHash]) -> None:
        """A branch that its conversation has left, root first: it goes before others, everywhere."""
        keys = self.keys(hashes)
        on_device = (self.pool.lookup(key) for key in keys)
        self.pool.demote([block_id for block_id in on_device if block_id is not None])
        self.offload.age(keys)

    def check(self, live: Iterable[Request]) -> None:
        """Conservation laws: every reference belongs to a table or a load."""
        self.pool.check()
        self.offload.check()
        references = [0] * self.pool.num_blocks
        for request in live:
            for block_id in request.block_tables[0]:
                references[block_id] += 1
        for load in self.loads.active():
            references[load.block_id] += 1
        actual = [self.pool.ref_count(block_id) for block_id in range(self.pool.num_blocks)]
        assert actual == references, "references do not match block tables and loads"

    # --- identity ---------------------------------------------------------------------------

    def _key(self, request: Request, index: int) -> BlockKey:
        hashes = request.block_hashes
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else request.root_hash
            hashes.append(block_hash(parent, self._tokens(request, len(hashes))))
        return BlockKey(hashes[index], self.group.index)

    def _meta(self, request: Request, index: int) -> BlockMeta:
        parent = request.block_hashes[index - 1] if index else request.root_hash
        return BlockMeta(parent, tuple(self._tokens(request, index)), request.root_hash)

    def _tokens(self, request: Request, index: int) -> list[int]:
        start = index * self.block_size
        tokens = request.token_ids[start : start + self.block_size]
        assert len(tokens) == self.block_size, "a block is hashed only when its tokens are known"
        return tokens


def count_by_tier(sources: list[str], block_size: int) -> CachedTokens:
    """Cached tokens of a hit whose blocks came from `sources`."""
    counts = {name: sources.count(name) * block_size for name in (DEVICE, "cpu", "disk")}
    return CachedTokens(**counts)
