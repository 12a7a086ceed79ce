"""The tiers below the device as one: what to save, what may be loaded, what to copy when.

    offer, hold, withdraw    what the device holds         poll          one round of copies
    lookup, touch            which tier holds a block      copied_out,   the round was executed
    load, start_loads        bring blocks back             copied_in
    cancel                   think better of it            check         the conservation laws
    pin, unpin, age          what to keep, what to give    fate          what became of a block
    condemn                  a block was found bad         flush, reset, close

Everything is called by one task, the planner, and nothing blocks: disk work runs on daemon threads
and its results are taken in `poll`. The manager calls `wake` whenever a `poll` would have news,
from any thread; a planner that polls then, and now and then while a call may hang, misses nothing.
Without tiers it is the null object: it holds nothing and asks for nothing.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence

from offload.history import EVICTED, FAILED_VERIFICATION, Fate, History
from offload.inquiry import Inquiry
from offload.io_threads import Job, Urgency
from offload.lane import Lane
from offload.lineage import Link, Suspects
from offload.load_table import LoadTable
from offload.pins import PinTable
from offload.save_queue import SaveQueue, SaveTally
from offload.staging import Staging
from offload.tier import (
    TAG_BYTES,
    BlockHash,
    BlockKey,
    BlockMeta,
    Forget,
    OffloadError,
    Tier,
    TierStats,
    chain_order,
)
from offload.transfers import CopyIn, CopyOut, Transfers

_MAX_ROUND_BYTES = 64 << 20  # copied in one round, each way: a forward pass waits for it
_PROBED_BLOCKS = 8
_PATIENCE = 0.002  # seconds between looks at work that only time can finish
_DEVICE = "device"  # in the history: what lies above the tiers
_CLOSE_SECONDS = 5.0  # for calls in flight when the manager is closed


class OffloadManager:
    """Write-through saves into every tier, verified loads from the nearest.

    `tiers` come nearest first. `staging_bytes` bounds the memory between device and disk;
    `write_deadline` is when a hung write counts as failed, `stall_seconds` when a call counts as
    hung for lookups, all in seconds.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        block_bytes: int,
        staging_bytes: int = 64 << 20,
        io_threads: int = 4,
        write_deadline: float = 30.0,
        stall_seconds: float = 5.0,
        survey_seconds: float = 10.0,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._wake_planner = wake
        self._woken = False
        self._write_deadline = write_deadline
        self._history = History()
        self._lanes = [
            Lane(
                tier,
                io_threads=io_threads,
                stall_seconds=stall_seconds,
                survey_seconds=survey_seconds,
                history=self._history,
                wake=self._wake,
            )
            for tier in tiers
        ]
        if len({lane.tier.name for lane in self._lanes}) != len(self._lanes):
            raise ValueError("two tiers of one name")
        self._pins = PinTable(self._lanes)
        self._staging = Staging(staging_bytes, block_bytes)
        max_copies = max(1, _MAX_ROUND_BYTES // block_bytes)
        self.memory_blocks = sum(
            lane.tier.capacity_bytes // block_bytes for lane in self._lanes if lane.in_memory
        )
        self._saves = SaveQueue(
            self._lanes,
            self._staging,
            block_bytes=block_bytes,
            write_deadline=write_deadline,
            max_copies=max_copies,
            # Enough to keep the threads busy between rounds, never most of a small tier.
            max_pinned_sources=max(1, min(4 * io_threads, self.memory_blocks // 4)),
            wake=self._wake,
        )
        self._loads = LoadTable(
            self._lanes,
            self._staging,
            block_bytes=block_bytes,
            max_copies=max_copies,
            evicted=self._saves.evicted,
            wake=self._wake,
        )
        self.inquiry = Inquiry(self._lanes, self._saves.resident)

    def _wake(self) -> None:
        # Set before the call and cleared before `poll` looks, so no news falls between.
        if not self._woken:
            self._woken = True
            self._wake_planner()

    def _lane(self, name: str) -> Lane:
        for lane in self._lanes:
            if lane.tier.name == name:
                return lane
        raise KeyError(f"no tier {name!r}")

    def offer(self, key: BlockKey, meta: BlockMeta, block_id: int) -> None:
        """A committed block lies in a device block: every tier that lacks it shall have it.

        Idempotent. Under back-pressure the save is put off, for as long as the block is resident
        or held by a memory tier.
        """
        self._saves.offer(key, meta, block_id)

    def offer_again(self, key: BlockKey, meta: BlockMeta, block_id: int) -> None:
        """As `offer`, for a block committed earlier: a tier that was reset since then, while the
        block lay elsewhere, does not get it back."""
        self._saves.offer_again(key, meta, block_id)

    def hold(self, key: BlockKey, meta: BlockMeta, block_id: int) -> None:
        """A block loaded from a tier lies in a device block: not offered, for it is no news, but
        once the tiers have lost it a `flush` finds it here."""
        self._saves.hold(key, meta, block_id)

    def withdraw(self, key: BlockKey, what: str = EVICTED) -> None:
        """The device copy goes, `what` says how. Copies handed out already are unaffected; saves
        still pending continue from a memory tier or are counted as put off, then lost."""
        self._history.note(key, _DEVICE, what)
        self._saves.withdraw(key)

    def lookup(self, key: BlockKey) -> str | None:
        """The nearest tier that holds the block and would serve it; no side effects."""
        for lane in self._lanes:
            if lane.holds(key):
                return lane.tier.name
        return None

    def touch(self, keys: Sequence[BlockKey], again: bool = False) -> None:
        """The keys of a chain, root first, were used: recent in every tier that holds them, the
        root most of all. `again` if a new request found them; without it they are only put in
        order, and worth no more. Saves that failed are tried again if the device has the block."""
        for key in chain_order(keys):
            self._saves.touch(key, again)

    def age(self, keys: Sequence[BlockKey]) -> None:
        """The keys of a branch, root first, that its conversation has left: evicted before all
        others in every tier, tail first, unless they are pinned or used again."""
        for key in chain_order(keys):
            for lane in self._lanes:
                lane.tier.age(key)

    def pin(self, name: str, keys: Sequence[BlockKey], until: float) -> tuple[int, int]:
        """Do not evict what the tiers hold of a chain, root first, until then (seconds since the
        epoch); in place of what the name pinned before.

        All pins together take at most PIN_SHARE of each tier, so the leading blocks come first and
        the rest may stay unpinned. Resets, failed verifications and restarts end it for a block.
        Returns how many blocks are pinned in some tier, and their bytes in all of them.
        """
        self._pins.lapse(time.time())
        return self._pins.pin(name, keys, until)

    def unpin(self, name: str) -> tuple[int, int]:
        """Undo a `pin`: blocks and bytes that it still held, as `pin` counts them."""
        self._pins.lapse(time.time())
        return self._pins.unpin(name)

    def fate(self, key: BlockKey) -> list[Fate]:
        """How a block went from the device and from each tier, the latest first; it may have come
        back since. Of the last ones only, and of this process."""
        return self._history.fate(key, [_DEVICE, *(lane.tier.name for lane in self._lanes)])

    def load(self, key: BlockKey, block_id: int, tier: str | None = None) -> int:
        """Bring a block into a device block; the ticket that `poll` will name.

        The stored block cannot be evicted until then, so whoever loads several that `lookup` found
        asks for all of them before `start_loads`. KeyError if no tier, or not the one asked for,
        holds it.
        """
        name = tier or self.lookup(key)
        if name is None:
            raise KeyError(f"no tier holds {key.block_hash.hex()}.{key.group}")
        return self._loads.begin(self._lane(name), key, block_id)

    def promote(self, key: BlockKey) -> int | None:
        """Bring a block from disk into memory and no further; the ticket, which `poll` names only
        if that fails. None if memory has it, or disk has not, or there is no memory tier."""
        above = False
        for lane in self._lanes:
            if lane.holds(key):
                may = above and not lane.in_memory
                return self._loads.begin(lane, key, None) if may else None
            above = above or lane.in_memory
        return None

    def in_flight(self, ticket: int) -> bool:
        """Whether a load or promotion has neither succeeded nor failed nor been cancelled."""
        return self._loads.in_flight(ticket)

    def start_loads(self) -> None:
        """Begin to read what `load` asked for, now and not with the next `poll`."""
        self._loads.start()

    def cancel(self, ticket: int) -> None:
        """Abandon a load: no copy of it will be handed out, nor its failure reported. A copy
        handed out already must still be reported by `copied_in`."""
        self._loads.cancel(ticket)

    def poll(self) -> Transfers:
        """Take what the threads have finished, start what can start, hand out a round of copies.

        The copies out must be executed before the device blocks are overwritten, all before their
        report. Rounds are bounded: `wake` is called again when the report leaves more to do.
        """
        self._woken = False
        self._pins.lapse(time.time())
        self._gather()
        copies_out = self._saves.start()
        self._loads.start()
        for lane in self._lanes:
            lane.survey_if_due()
        return Transfers(copies_out, self._loads.hand_out(), self._loads.take_failed())

    def _gather(self) -> None:
        for lane in self._lanes:
            lane.take_finished()
        self._saves.expire()

    def copied_out(self, copies: Sequence[CopyOut], seconds: float | None = None) -> None:
        """The copies out of a round were executed, in `seconds` if measured."""
        self._saves.copied(copies, seconds)
        self._wake_for_more(len(copies))

    def copied_in(self, copies: Sequence[CopyIn], seconds: float | None = None) -> None:
        """The copies in of a round were executed, in `seconds` if measured."""
        self._loads.copied(copies, seconds)
        self._wake_for_more(len(copies))

    def _wake_for_more(self, num_copies: int) -> None:
        # An empty round changed nothing; waking for it would spin while a tier hangs.
        if not num_copies:
            return
        if self._loads.has_news or any(lane.pending for lane in self._lanes):
            self._wake()

    def idle(self) -> bool:
        """Whether nothing is pending, under way or unreported. A write given up does not count."""
        return self._saves.idle and self._loads.idle

    def pending_saves(self, tier: str) -> int:
        """Saves of a tier that have neither succeeded nor failed. KeyError without the tier."""
        return self._saves.num_pending(self._lane(tier))

    def probe(self) -> None:
        """Measure what loading from each tier costs before anybody waits for it: read the blocks
        used last, if a tier holds any, and let them go again. Memory needs no probe."""
        for lane in self._lanes:
            if not lane.in_memory:
                self._loads.probe(lane, lane.tier.present()[-_PROBED_BLOCKS:])

    def estimated_load_seconds(self, tier: str, num_blocks: int) -> float | None:
        """From the loads so far; None while the tier is unmeasured."""
        return self._lane(tier).rate.estimate(num_blocks)

    def stats(self) -> dict[str, TierStats]:
        """Counters and gauges by tier name."""
        self._pins.lapse(time.time())
        return {
            lane.tier.name: lane.snapshot(self._saves.num_pending(lane)) for lane in self._lanes
        }

    async def flush(self, pump: Callable[[], Awaitable[None]]) -> dict[str, dict[str, int]]:
        """Save everything that an upper tier holds and a lower one lacks, durably.

        `pump` lets the planner execute a round. Waits for the saves pending now, not for those
        offered meanwhile; on a hung tier they count as failed. Cancelled, it leaves the saves to
        go on by themselves. Returns {"saved": {tier: blocks}, "failed": {tier: blocks}}.
        """
        self._saves.offer_down()
        tally = self._saves.tally()
        try:
            await self._settle(tally, pump)
        finally:
            self._saves.untrack(tally)
        for lane in self._lanes:
            if not lane.in_memory and await self._finish(lane, self._sync(lane)) is not None:
                name = lane.tier.name
                tally.failed[name] += tally.saved[name]
                tally.saved[name] = 0
        return {"saved": tally.saved, "failed": tally.failed}

    async def _settle(self, tally: SaveTally, pump: Callable[[], Awaitable[None]]) -> None:
        num_left, deadline = -1, 0.0
        while tally.outstanding:
            await pump()
            if len(tally.outstanding) != num_left:
                num_left = len(tally.outstanding)
                deadline = time.monotonic() + self._write_deadline
            for lane in self._lanes:
                if lane.saves_stalled or time.monotonic() > deadline:
                    self._saves.give_up(tally, lane)
            if tally.outstanding:
                await asyncio.sleep(_PATIENCE)

    @staticmethod
    def _sync(lane: Lane) -> Job:
        return lane.threads.submit(lane.tier.sync, Urgency.SAVE, lambda job: None)

    async def _finish(self, lane: Lane, job: Job) -> Exception | None:
        """Wait for a job, as long as a write may take; the error it ended with."""
        deadline = time.monotonic() + self._write_deadline
        while not job.finished:
            if time.monotonic() > deadline or (job.started is None and lane.saves_stalled):
                return TimeoutError("the tier hangs")
            await asyncio.sleep(_PATIENCE)
            self._gather()
        return job.error

    def next_look(self) -> float | None:
        """In how many seconds time alone brings something to do; None: never."""
        when = min((lane.next_look for lane in self._lanes), default=math.inf)
        return None if when == math.inf else max(0.0, when - time.monotonic())

    async def reset(self, tiers: Collection[str], where: Forget | None = None) -> dict[str, int]:
        """Empty tiers, at once and durably, or `where` given, take only its blocks out of them;
        blocks dropped by tier.

        Loads not yet copied fail; nothing that was stored, pending or in flight becomes visible
        afterwards, restart included. Other tiers keep what they hold. Saves offered from now on
        start when the old files are out of reach, before this returns. Cancelled, the indexes are
        empty and the rest goes on. KeyError for an unknown tier, before anything is dropped;
        OffloadError if it could not be made durable.
        """
        dropped, wipes = self._drop([self._lane(name) for name in tiers], where)
        for lane, wipe in wipes:
            error = await self._finish(lane, wipe)
            if error is not None:
                raise OffloadError(
                    f"tier {lane.tier.name} holds none of it now, but a restart may find its old "
                    f"blocks: {error}"
                ) from error
        return dropped

    def _drop(
        self, lanes: Sequence[Lane], where: Forget | None
    ) -> tuple[dict[str, int], list[tuple[Lane, Job]]]:
        """At once: blocks dropped by tier, and what makes it durable."""
        dropped: dict[str, int] = {}
        wipes: list[tuple[Lane, Job]] = []
        for lane in lanes:  # all of them first: what one tier holds tells what another waits for
            self._saves.drop(lane, where)
            self._loads.fail_all(lane, where)
        for lane in lanes:
            drop = lane.tier.drop
            dropped[lane.tier.name] = lane.tier.drop_all() if where is None else drop(where)
            if not lane.in_memory:
                wipes.append((lane, lane.wipe(where)))
        self._saves.drop_lost()
        return dropped, wipes

    def condemn(self, key: BlockKey, root: BlockHash, tier: str) -> tuple[Suspects, list[str]]:
        """A block that `tier` served, of the chain of `root`, was found bad though it had passed
        verification. It goes from every tier, and with it all that may have been computed from it.

        Nothing of them that is stored, pending or in flight is served again; a file that cannot be
        removed is logged, and a restart may find it. The device's copies are the caller's to
        forget before anything is offered. Returns which blocks are meant, and where the bad one's
        bytes lie.
        """
        suspects = Suspects(self._links(), key.block_hash, root)
        condemned = {held for held, _ in self._saves.metas() if held.block_hash in suspects}
        locations: list[str] = []
        stored: list[tuple[Lane, BlockKey]] = []
        for lane in self._lanes:
            lane.stats.verify_failures += lane.tier.name == tier
            bad = [entry for entry in lane.tier.entries() if entry.key.block_hash in suspects]
            stored += [(lane, entry.key) for entry in bad]
            places = [lane.tier.location(entry) for entry in bad if entry.key == key]
            locations += [place for place in places if place is not None]
        condemned.update(held for _, held in stored)
        self._drop(self._lanes, Forget(keys=frozenset(condemned)))
        for lane, held in stored:
            lane.note(held, FAILED_VERIFICATION)
        return suspects, locations

    def _links(self) -> Iterator[Link]:
        for lane in self._lanes:
            for entry in lane.tier.entries():
                yield Link(entry.key.block_hash[:TAG_BYTES], entry.root_tag, entry.parent_tag)
        for key, meta in self._saves.metas():
            yield Link(key.block_hash[:TAG_BYTES], meta.root_tag, meta.parent_tag)

    async def close(self, pump: Callable[[], Awaitable[None]] | None = None) -> None:
        """Stop; flush first if `pump` is given. What has not started is dropped, calls in flight
        get a few seconds, a hung one is left behind. The manager is not used afterwards."""
        if pump is not None:
            await self.flush(pump)
        for lane in self._lanes:
            if not lane.in_memory and not lane.saves_stalled:
                lane.survey()  # records what was used when, for the order of eviction
        deadline = time.monotonic() + _CLOSE_SECONDS
        while any(lane.surveying for lane in self._lanes) and time.monotonic() < deadline:
            await asyncio.sleep(_PATIENCE)
            self._gather()
        for lane in self._lanes:
            left = max(0.0, deadline - time.monotonic())
            if await asyncio.to_thread(lane.threads.close, left):
                lane.tier.close()  # not under a hung call, which still uses its descriptors

    def check(self) -> None:
        """AssertionError if a conservation law is broken: states, bytes, slots, pins, buffers."""
        for lane in self._lanes:
            lane.tier.check()
            held = self._saves.num_pins(lane) + self._loads.num_pins(lane)
            assert lane.tier.num_pins() == held, f"{lane.tier.name}: pins do not balance"
            keeps = self._pins.num_keeps(lane)
            assert lane.tier.num_keeps() == keeps, f"{lane.tier.name}: keeps do not balance"
        out = self._saves.num_buffers + self._loads.num_buffers
        assert out + self._staging.num_free == self._staging.num_buffers, "buffers do not balance"
