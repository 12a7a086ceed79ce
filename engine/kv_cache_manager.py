"""Block tables: growing, committing and releasing the blocks of a request.

    match    which leading blocks are held, and where (see `prefix_match`)
    admit    take them: reference, start loads, allocate the rest of the known tokens
    grow     room for the next rows
    commit   publish newly full, committed blocks, offer them to the tiers, free what slid out
    conclude the request ends or is preempted here: what its end makes reachable is offered too
    release  give everything back, tails first

Planning only: it moves no bytes. Copies and reads happen elsewhere, ordered before the next pass.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from functools import partial

from engine.block_chain import hash_at, meta_at
from engine.block_pool import BlockPool
from engine.kv_groups import KVGroup, max_blocks_held, required_blocks
from engine.kv_loads import KVLoads
from engine.load_samples import LoadSamples
from engine.prefix_match import DEVICE, BlockHit, PrefixHit, PrefixMatcher
from engine.request import NO_BLOCK, Request, committed_len
from offload.history import FAILED_VERIFICATION, RESET
from offload.lineage import Suspects
from offload.manager import OffloadManager
from offload.tier import BlockHash, BlockKey, Forget


class KVCacheManager:
    """Owns block pool, loads and the offload manager's view of requests; engine loop only."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        offload: OffloadManager,
        *,
        groups: Sequence[KVGroup] = (KVGroup(0),),
        offload_prompt_only: bool = False,
        samples: LoadSamples | None = None,
    ) -> None:
        self.block_size = block_size
        self.groups = tuple(groups)
        self.offload = offload
        self.pool = BlockPool(
            num_blocks,
            on_evict=offload.withdraw,
            on_reset=partial(offload.withdraw, what=RESET),
        )
        self.loads = KVLoads(self.pool, offload, samples)
        self._matcher = PrefixMatcher(self.groups, block_size, self.pool, self.loads, offload)
        self._full = [group for group in self.groups if group.window is None]
        self._windows = [group for group in self.groups if group.window is not None]
        self._offload_prompt_only = offload_prompt_only

    # --- sizes ------------------------------------------------------------------------------

    def match(self, request: Request) -> PrefixHit:
        """The longest held prefix that leaves at least one known token to compute."""
        return self._matcher.match(request)

    def num_blocks_for(self, num_positions: int) -> int:
        """Blocks of one group that cover so many positions."""
        return -(-num_positions // self.block_size)

    def max_blocks_held(self, num_positions: int) -> int:
        """Blocks of all groups that a request of that many positions needs at its longest."""
        return sum(max_blocks_held(group, num_positions, self.block_size) for group in self.groups)

    def capacity_tokens(self, limit: int) -> int:
        """Positions, at most `limit`, that one request may have with the whole pool to itself."""
        num_blocks = bisect.bisect_right(
            range(self.num_blocks_for(limit) + 1),
            self.pool.num_blocks,
            key=lambda blocks: self.max_blocks_held(blocks * self.block_size),
        )
        return min(limit, (num_blocks - 1) * self.block_size)

    def num_blocks_to_take(self, request: Request, hit: PrefixHit, start: int) -> int:
        """How many blocks `admit` would move out of the unreferenced set, and what windows will
        need beside them. `start` as for `admit`."""
        taken = _taken(hit, start)
        shared = sum(
            block.block_id is not None and not self.pool.is_unreferenced(block.block_id)
            for block in taken
        )
        in_windows = sum(self.groups[block.key.group].window is not None for block in taken)
        to_come = self.max_blocks_held(request.num_tokens)
        return to_come - shared + (in_windows if start < hit.num_held else 0)

    # --- a request's life -------------------------------------------------------------------

    def admit(self, request: Request, hit: PrefixHit, start: int) -> None:
        """Build the block tables; loads they need are started.

            |-- on the device --|-- recomputed by choice --|-- loaded ahead --|-- to compute --|
            0               num_device                   start            num_held

        Blocks from `start` on are loaded, so `start` = `num_held` loads nothing. The caller has
        checked `num_blocks_to_take` against the pool. What is held is referenced before anything
        is allocated, so that allocation cannot evict it.
        """
        assert not request.block_tables, "admitted twice"
        num_blocks = self.num_blocks_for(request.num_tokens)
        request.block_tables = [[NO_BLOCK] * num_blocks for _ in self.groups]
        request.first_kept = [0] * len(self.groups)
        request.branch_end = hit.num_shared if hit.num_shared > hit.num_held else 0
        taken = _taken(hit, start)
        for block in taken:
            if block.block_id is not None:
                self.pool.reference(block.block_id)
        # What is computed meanwhile grows from the front, so a mixed load comes from the back.
        for block in reversed(taken) if start > hit.num_device else taken:
            self._take(request, block)
        self.offload.start_loads()
        for block in hit.device:
            self._offer_again(request, block)
        request.num_computed_tokens = hit.num_device * self.block_size
        request.num_committed_blocks = request.num_hit_blocks = hit.num_device
        request.ahead = range(start, hit.num_held) if start < hit.num_held else None
        if not self.reserve(request):
            raise AssertionError("admitted without room for the known tokens")

    def _take(self, request: Request, hit: BlockHit) -> None:
        block_id = self.pool.allocate() if hit.block_id is None else hit.block_id
        request.block_tables[hit.key.group][hit.index] = block_id
        if hit.block_id is None:
            meta = meta_at(request, hit.index, self.block_size)
            self.loads.start(request, hit.index, hit.key, meta, block_id, hit.source)
        elif hit.source != DEVICE:
            self.loads.join(request, hit.index, hit.key)

    def _offer_again(self, request: Request, hit: BlockHit) -> None:
        """What was not worth storing for whoever computed it may be so for `request`."""
        group = self.groups[hit.key.group]
        if self._offload_prompt_only or group.window is not None:
            self._offer(request, group, hit.index)

    def arrive_ahead(self, request: Request) -> None:
        """Everything loaded ahead is verified and in place, everything before it computed."""
        assert request.ahead is not None
        assert not request.pending_loads
        assert request.num_computed_tokens == request.ahead.start * self.block_size
        request.num_computed_tokens = request.ahead.stop * self.block_size
        request.ahead = None

    def shorten_ahead(self, request: Request, index: int) -> None:
        """A load failed or is late: what is loaded ahead ends before block `index`.

        With window groups nothing of it is left: a shorter prefix would need blocks of theirs
        that were not loaded.
        """
        if request.ahead is None:
            return
        stop = request.ahead.start if self._windows else max(index, request.ahead.start)
        self._give_up(request, range(stop, request.ahead.stop))
        request.ahead = range(request.ahead.start, stop) if stop > request.ahead.start else None

    def overtake_ahead(self, request: Request, num_blocks: int) -> None:
        """Computing has reached what is loaded ahead before the loads have come: `num_blocks` of
        it will be computed instead."""
        assert request.ahead is not None
        start = min(request.ahead.start + num_blocks, request.ahead.stop)
        self._give_up(request, range(request.ahead.start, start))
        request.ahead = range(start, request.ahead.stop) if start < request.ahead.stop else None

    def _give_up(self, request: Request, indices: range) -> None:
        """The blocks may be shared, so they are released, never written."""
        self.loads.leave(request, indices)
        for index in reversed(indices):
            for table in request.block_tables:
                if table[index] != NO_BLOCK:
                    self.pool.release(table[index])
                    table[index] = NO_BLOCK

    def reserve(self, request: Request) -> bool:
        """Blocks of the full groups for every known token, so that a prompt once admitted is never
        stuck halfway; False, with nothing taken, if the pool is short."""
        return self._cover(request, self._full, request.num_tokens)

    def grow(self, request: Request, num_positions: int) -> bool:
        """Make every group's table cover `num_positions`, except what is loaded ahead; False, with
        nothing taken, if the pool is short."""
        return self._cover(request, self.groups, num_positions)

    def grow_for_rows(self, request: Request, num_rows: int) -> int:
        """As `grow`, for as many of `num_rows` more rows as the pool has blocks for."""
        start = request.num_computed_tokens
        while num_rows and not self.grow(request, start + num_rows):
            # One block less at its end, until it fits.
            num_rows = max(0, (start + num_rows - 1) // self.block_size * self.block_size - start)
        return num_rows

    def _cover(self, request: Request, groups: Sequence[KVGroup], num_positions: int) -> bool:
        first = request.num_computed_tokens // self.block_size
        end = self.num_blocks_for(num_positions)
        ahead = request.ahead or range(0)
        missing: list[tuple[list[int], int]] = []
        for group in groups:
            table = request.block_tables[group.index]
            table.extend([NO_BLOCK] * (end - len(table)))
            missing += [
                (table, index)
                for index in range(first, end)
                if table[index] == NO_BLOCK and index not in ahead
            ]
        if len(missing) > self.pool.num_available:
            return False
        for table, index in missing:
            table[index] = self.pool.allocate()
        return True

    def commit(self, request: Request) -> None:
        """Publish what `committed_len` covers and nothing above it; free what slid out."""
        num_full = committed_len(request) // self.block_size
        for index in range(request.num_committed_blocks, num_full):
            request.num_committed_blocks = index + 1
            if index < request.first_cacheable_block:
                continue
            for group in self.groups:
                block_id = request.block_tables[group.index][index]
                if block_id == NO_BLOCK:
                    continue
                key = self._key(request, group, index)
                is_new = self.pool.register(key, block_id, request.root_hash)
                if is_new or group.window is not None:
                    self._offer(request, group, index, is_new=is_new)
        self._free_slid_out(request)

    def conclude(self, request: Request) -> None:
        """Commit, and offer what the place where the request stops makes reachable: whoever goes
        on from there needs the last window. Legal at any time and more than once."""
        self.commit(request)
        if not request.block_tables:
            return
        self._publish_orphans(request)
        end = committed_len(request) // self.block_size * self.block_size
        for group in self._windows:
            for index in self._required(group, end):
                self._offer(request, group, index, reachable=True)

    def _publish_orphans(self, request: Request) -> None:
        """Blocks that had a twin in the prefix map when they were committed, and have none now: the
        twin was evicted, and without this its content would be lost with them."""
        for index in range(request.first_cacheable_block, request.num_committed_blocks):
            for group in self.groups:
                block_id = request.block_tables[group.index][index]
                if block_id == NO_BLOCK:
                    continue
                key = self._key(request, group, index)
                if self.pool.lookup(key) is None:
                    self.pool.register(key, block_id, request.root_hash)
                    self._offer(request, group, index)

    def touch(self, request: Request, num_found: int = 0) -> None:
        """Make the committed chain recent in every tier, its root most of all; `num_found` blocks
        if the request, that has just come, found so many somewhere: these are used again."""
        num_blocks, again = num_found or request.num_committed_blocks, bool(num_found)
        hashes = request.block_hashes[:num_blocks]
        end = num_blocks * self.block_size
        windows = {group.index: self._required(group, end) for group in self._windows}
        self.offload.touch(
            [
                BlockKey(value, group.index)
                for index, value in enumerate(hashes)
                for group in self.groups
                if group.window is None
                or index in windows[group.index]
                or self._is_reachable(request, group, index)
            ],
            again,
        )

    def release(self, request: Request) -> None:
        """Give back every block, tails first, so that heads outlive them in the prefix map."""
        self.loads.leave(request)
        longest = max(map(len, request.block_tables), default=0)
        for index in reversed(range(longest)):
            for table in request.block_tables:
                if index < len(table) and table[index] != NO_BLOCK:
                    self.pool.release(table[index])
        request.block_tables = []
        request.ahead = None
        request.num_committed_blocks = request.num_hit_blocks = 0
        request.num_computed_tokens = 0
        request.first_cacheable_block = 0  # what a reset barred is gone; the rest is new

    def _free_slid_out(self, request: Request) -> None:
        """Window groups keep what the last committed boundary requires."""
        end = request.num_committed_blocks * self.block_size
        for group in self._windows:
            kept = self._required(group, end).start
            table = request.block_tables[group.index] if request.block_tables else []
            for index in range(request.first_kept[group.index] if table else 0, kept):
                if table[index] == NO_BLOCK:
                    continue
                # Nobody will look for it, unless a prefix may be cut there.
                self.pool.release(table[index], cold=not self._is_reachable(request, group, index))
                table[index] = NO_BLOCK
            if table:
                request.first_kept[group.index] = max(kept, request.first_kept[group.index])

    # --- what is worth storing --------------------------------------------------------------

    def _offer(
        self,
        request: Request,
        group: KVGroup,
        index: int,
        *,
        is_new: bool = False,
        reachable: bool = False,
    ) -> None:
        """Offer the device's block to the tiers, if it is worth storing; again changes nothing.

        `is_new`: it was committed just now, by `request`."""
        if not reachable and not self._is_reachable(request, group, index):
            return
        key = self._key(request, group, index)
        block_id = self.pool.lookup(key)
        if block_id is not None and self._may_offload(request, index):
            offer = self.offload.offer if is_new else self.offload.offer_again
            offer(key, meta_at(request, index, self.block_size), block_id)

    def _may_offload(self, request: Request, index: int) -> bool:
        if not self._offload_prompt_only:
            return True
        return index < request.num_prompt_tokens // self.block_size

    def _is_reachable(self, request: Request, group: KVGroup, index: int) -> bool:
        """Whether a lookup known to come can ask for the block.

        Every block of a full group. Of a window group, what is required where prompts that go on
        from this one find its end, where a replay of it does, and where the request saw others'
        chains go on that it could not use: judged from the prompt's end and not from a chunk's
        (vllm-project/vllm issue 54362). The end of the output is judged when it is there.
        """
        if group.window is None:
            return True
        num_prompt = request.num_prompt_tokens
        ends = (num_prompt // self.block_size, (num_prompt - 1) // self.block_size)
        return any(
            index in self._required(group, end * self.block_size)
            for end in (*ends, request.branch_end)
        )

    def _key(self, request: Request, group: KVGroup, index: int) -> BlockKey:
        return BlockKey(hash_at(request, index, self.block_size), group.index)

    def _required(self, group: KVGroup, num_tokens: int) -> range:
        return required_blocks(group, num_tokens, self.block_size)

    # --- the cache as a whole ---------------------------------------------------------------

    def reset(self, live: Iterable[Request], where: Forget | None = None) -> int:
        """Empty the prefix map, or take the blocks of `where` out of it; what live requests have
        computed of these so far never enters it again. How many keys the map lost."""
        for request in live:
            if where is None or self._is_touched(request, where):
                request.first_cacheable_block = self._num_begun(request)
        self.loads.reset(where)
        return self.pool.reset(where)

    def _is_touched(self, request: Request, where: Forget) -> bool:
        if request.root_hash in where.roots:
            return True
        return any(key in where.keys for key in self.keys(self.begun(request)))

    def _num_begun(self, request: Request) -> int:
        touched = request.num_computed_tokens + request.num_inflight_tokens
        return max(self.num_blocks_for(touched), request.ahead.stop if request.ahead else 0)

    def begun(self, request: Request) -> list[BlockHash]:
        """The whole blocks of a request that are computed or loaded, or being so, root first."""
        num_known = min(self._num_begun(request), request.num_tokens // self.block_size)
        return [hash_at(request, index, self.block_size) for index in range(num_known)]

    def keys(self, hashes: Iterable[BlockHash]) -> list[BlockKey]:
        """The blocks of a chain in every group, root first."""
        return [BlockKey(value, group.index) for value in hashes for group in self.groups]

    def prefix_keys(self, block_hash: BlockHash) -> list[BlockKey]:
        """A block in the groups that need it however long the prefix goes on; in all of them, if
        each has a window."""
        return [BlockKey(block_hash, group.index) for group in self._full or self.groups]

    def nearest(self, key: BlockKey) -> str | None:
        """The nearest tier that holds a block or loads it, the device included."""
        if self.pool.lookup(key) is not None:
            return DEVICE
        load = self.loads.find(key)
        return self.offload.lookup(key) if load is None else load.tier

    def supersede(self, hashes: Sequence[BlockHash]) -> None:
        """A branch that its conversation has left, root first: everywhere it goes before others."""
        keys = self.keys(hashes)
        for key in reversed(keys):
            block_id = self.pool.lookup(key)
            if block_id is not None:
                self.pool.demote(block_id)
        self.offload.age(keys)

    def forget(self, suspects: Suspects) -> int:
        """Take these blocks out of the prefix map. Legal while no request is live: what one has
        computed from them would enter the map again. How many there were."""
        suspected = [key for key in self.pool.known() if key.block_hash in suspects]
        for key in suspected:
            block_id = self.pool.lookup(key)
            assert block_id is not None
            self.pool.forget(block_id)
            self.offload.withdraw(key, FAILED_VERIFICATION)
        return len(suspected)

    # --- blocks for an audit ----------------------------------------------------------------

    def borrow(self, request: Request, limit: int, cold: list[int]) -> bool:
        """Tables for computing `request` without anybody knowing: what the device holds of its
        prefix, and at most `limit` private blocks of all groups for the rest. They are never
        committed; `release` ends it.

        `cold` gets the blocks that nobody was expected to look for, to be demoted again. False,
        with nothing held, if that is too many or the pool is short.
        """
        hit = self._matcher.match(request)
        num_blocks = self.num_blocks_for(request.num_tokens)
        if (num_blocks - hit.num_device) * len(self.groups) > limit:
            return False
        request.block_tables = [[NO_BLOCK] * num_blocks for _ in self.groups]
        for block in hit.device:
            assert block.block_id is not None
            cold += [block.block_id] if self.pool.is_cold(block.block_id) else []
            self.pool.reference(block.block_id)
            request.block_tables[block.key.group][block.index] = block.block_id
        request.num_computed_tokens = hit.num_device * self.block_size
        if self._cover(request, self.groups, request.num_tokens):
            return True
        self.release(request)
        return False

    def check(self, live: Iterable[Request], audited: Iterable[int] = ()) -> None:
        """Conservation laws: every reference belongs to a table, a load or an audit."""
        self.pool.check()
        self.offload.check()
        references = [0] * self.pool.num_blocks
        for request in live:
            for table in request.block_tables:
                for block_id in table:
                    if block_id != NO_BLOCK:
                        references[block_id] += 1
        for block_id in (*(load.block_id for load in self.loads.active()), *audited):
            references[block_id] += 1
        actual = [self.pool.ref_count(block_id) for block_id in range(self.pool.num_blocks)]
        assert actual == references, "references do not match block tables, loads and audits"


def _taken(hit: PrefixHit, start: int) -> list[BlockHit]:
    """The blocks that are taken over when loading begins at block `start`."""
    return [*hit.device, *(block for block in hit.ahead if block.index >= start)]
