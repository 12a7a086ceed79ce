"""Saves: from the commit of a device block until every tier holds it.

    offered -> pending -> copied out of the device ----------------> PRESENT      (memory)
                 |   '--> copied into staging -> written by a thread -> PRESENT   (disk)
                 |   '--> written by a thread from the CPU tier's slot -> PRESENT (disk)
                 '--> lost: gone from the device and from memory before its turn came

A pending save holds nothing. It starts only when its tier has room for it and, on the way to disk,
when a staging buffer or one of a few pins on the CPU tier is free; until then it is put off.

A save that failed is tried again when its block is next used, and by itself: one of them now and
then, and as soon as one succeeds, all that are still held above.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from offload.history import LOST, RESET, SAVE_FAILED
from offload.io_threads import Job, Urgency
from offload.lane import Lane, outcome
from offload.staging import Staging
from offload.tier import (
    BlockKey,
    BlockMeta,
    BlockState,
    Entry,
    Forget,
    Reservation,
    RoomTakenError,
    TierFullError,
    WriteResult,
)
from offload.transfers import CopyOut


@dataclass(slots=True, eq=False)
class Save:
    """One block on its way into one tier."""

    lane: Lane
    key: BlockKey
    meta: BlockMeta
    reservation: Reservation
    buffer: int | None = None
    source: tuple[Lane, Entry] | None = None  # pinned in memory, instead of a buffer
    job: Job | None = None
    overdue: bool = False  # hung beyond its deadline and counted as failed
    dropped: bool = False  # overtaken by a reset


@dataclass(slots=True)
class SaveTally:
    """What became of a set of saves, for a flush that waits for them."""

    outstanding: set[tuple[str, BlockKey]] = field(default_factory=set)
    saved: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)

    def settle(self, name: str, key: BlockKey, saved: bool) -> None:
        if (name, key) in self.outstanding:
            self.outstanding.discard((name, key))
            counts = self.saved if saved else self.failed
            counts[name] += 1


class SaveQueue:
    """All saves of all tiers. Planner only; nothing blocks."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        staging: Staging,
        *,
        block_bytes: int,
        write_deadline: float,
        max_copies: int,
        max_pinned_sources: int,
        wake: Callable[[], None],
    ) -> None:
        self._lanes = lanes
        self._staging = staging
        self._block_bytes = block_bytes
        self._write_deadline = write_deadline
        self._max_copies = max_copies
        self._max_pinned_sources = max_pinned_sources
        self._wake = wake
        self.resident: dict[BlockKey, tuple[BlockMeta, int]] = {}  # offered, still on the device
        self._copying: dict[BlockKey, list[Save]] = {}
        self._active: dict[tuple[str, BlockKey], Save] = {}
        self._held: set[Save] = set()  # active, hung or overtaken: not yet ended
        self._tallies: list[SaveTally] = []
        self._num_pinned_sources = 0

    # -- what the device holds

    def offer(self, key: BlockKey, meta: BlockMeta, block_id: int) -> None:
        self.hold(key, meta, block_id)
        for lane in self._lanes:
            lane.barred.discard(key)
            self._want(lane, key)

    def offer_again(self, key: BlockKey, meta: BlockMeta, block_id: int) -> None:
        self.hold(key, meta, block_id)
        for lane in self._lanes:
            if key not in lane.barred:
                self._want(lane, key)

    def hold(self, key: BlockKey, meta: BlockMeta, block_id: int) -> None:
        self.resident[key] = (meta, block_id)

    def withdraw(self, key: BlockKey) -> None:
        if self.resident.pop(key, None) is None:
            return
        self._drop_if_lost(key)

    def touch(self, key: BlockKey, again: bool = False) -> None:
        for lane in self._lanes:
            lane.tier.touch(key, again)
            if key in lane.failed:
                del lane.failed[key]
                self._want(lane, key)

    def offer_down(self) -> None:
        """Want on disk whatever the device or memory holds and disk does not.

        Memory is not filled again with what it evicted: it would only evict something else.
        """
        for lane in self._lanes:
            if lane.in_memory:
                continue
            upper = [other.tier.present() for other in self._lanes if other.in_memory]
            for keys in (*upper, list(self.resident)):
                for key in keys:
                    if key not in lane.barred and lane.tier.state(key) is BlockState.ABSENT:
                        self._want(lane, key)

    def evicted(self, entries: Iterable[Entry]) -> None:
        """Memory gave up these blocks: saves that had no other source are lost."""
        for entry in entries:
            self._drop_if_lost(entry.key)

    def _want(self, lane: Lane, key: BlockKey) -> None:
        if lane.tier.state(key) is BlockState.PRESENT:
            lane.tier.touch(key)
        elif key not in lane.pending and (lane.tier.name, key) not in self._active:
            lane.pending[key] = None
            self._wake()

    def _drop_if_lost(self, key: BlockKey) -> None:
        if key in self.resident or key in self._copying or self._memory_source(key):
            return
        for lane in self._lanes:
            lane.failed.pop(key, None)
            if key in lane.pending:
                del lane.pending[key]
                self._lost(lane, key)

    def _lost(self, lane: Lane, key: BlockKey) -> None:
        lane.skipped["put off, then lost"] += 1
        lane.note(key, LOST)
        self._tell(lane, key, saved=False)

    def _memory_source(self, key: BlockKey) -> Lane | None:
        for lane in self._lanes:
            if lane.in_memory and lane.tier.state(key) is BlockState.PRESENT:
                return lane
        return None

    # -- starting

    def start(self) -> list[CopyOut]:
        """Start what can start; the copies to execute."""
        copies: list[CopyOut] = []
        for lane in self._lanes:
            if lane.retry_due() and lane.failed:
                lane.probe = self._retry(lane, 1)
            put_back: list[BlockKey] = []
            while lane.pending and not lane.num_wipes and not lane.saves_stalled:
                key, _ = lane.pending.popitem(last=False)
                state = lane.tier.state(key)
                if state is BlockState.PRESENT:
                    lane.tier.touch(key)
                    self._tell(lane, key, saved=True)
                elif state is not BlockState.ABSENT or key in self._copying:
                    put_back.append(key)  # busy: an eviction or a promotion of it under way
                elif not self._start_one(lane, key, copies):
                    lane.pending[key] = None
                    lane.pending.move_to_end(key, last=False)
                    break
            for key in reversed(put_back):
                lane.pending[key] = None
                lane.pending.move_to_end(key, last=False)
        return copies

    def _retry(self, lane: Lane, count: int | None = None) -> BlockKey | None:
        """Want again what failed, longest ago first; the first of it."""
        ready = [key for key in lane.failed if lane.tier.state(key) is BlockState.ABSENT][:count]
        for key in ready:
            del lane.failed[key]
            self._want(lane, key)
        if lane.failed:
            lane.retry_later()
        return ready[0] if ready else None

    def _start_one(self, lane: Lane, key: BlockKey, copies: list[CopyOut]) -> bool:
        """Start one save, or give it up for good; False if it must wait and the rest with it."""
        source = None if lane.in_memory else self._memory_source(key)
        if source is not None and self._num_pinned_sources < self._max_pinned_sources:
            return self._write_from_memory(lane, key, source)
        resident = self.resident.get(key)
        if resident is None and source is None:
            self._lost(lane, key)
            return True
        if resident is None or len(self._copying) >= self._max_copies:
            return False
        meta, block_id = resident
        try:
            save = self._take_destination(lane, key, meta)
        except TierFullError as error:
            self._failed(lane, key, error)
            return True
        if save is None:
            return False
        saves = [save]
        for other in self._lanes:
            if key in other.pending and not other.num_wipes and not other.saves_stalled:
                with suppress(TierFullError):  # said again, and counted, at its own turn
                    save = self._take_destination(other, key, meta)
                    if save is not None:
                        saves.append(save)
                        del other.pending[key]
        self._copying[key] = saves
        copies.append(CopyOut(key, block_id, tuple(self._view(save) for save in saves)))
        return True

    def _take_destination(self, lane: Lane, key: BlockKey, meta: BlockMeta) -> Save | None:
        """Room in a tier and a buffer on the way to it; None and nothing taken if it must wait."""
        if lane.tier.state(key) is not BlockState.ABSENT:
            return None
        if lane.in_memory:
            reservation = lane.tier.reserve(key, meta)
            if reservation is None:
                return None
            self.evicted(reservation.evicted)
            return self._activate(Save(lane, key, meta, reservation))
        buffer = self._staging.take_for_save()
        if buffer is None:
            return None
        reservation = None
        try:
            reservation = lane.tier.reserve(key, meta)
        finally:
            if reservation is None:
                self._staging.give_back(buffer)
        if reservation is None:
            return None
        return self._activate(Save(lane, key, meta, reservation, buffer))

    def _write_from_memory(self, lane: Lane, key: BlockKey, source: Lane) -> bool:
        meta = source.tier.meta(key)
        assert meta is not None, "memory forgot what a block holds"
        try:
            reservation = lane.tier.reserve(key, meta)
        except TierFullError as error:
            self._failed(lane, key, error)
            return True
        if reservation is None:
            return False
        entry = source.tier.pin(key)
        self._num_pinned_sources += 1
        save = self._activate(Save(lane, key, meta, reservation, source=(source, entry)))
        self._write(save)
        return True

    def _activate(self, save: Save) -> Save:
        self._held.add(save)
        self._active[save.lane.tier.name, save.key] = save
        return save

    def _view(self, save: Save) -> memoryview:
        if save.source is not None:
            lane, entry = save.source
            return lane.tier.slot(entry)
        if save.buffer is not None:
            return self._staging.view(save.buffer)
        return save.lane.tier.slot(save.reservation.entry)

    def _write(self, save: Save) -> None:
        tier, view = save.lane.tier, self._view(save)
        save.job = save.lane.threads.submit(
            lambda: tier.write(save.reservation, save.meta, view),
            Urgency.SAVE,
            lambda job: self._end(save, outcome(job), job.seconds),
        )

    # -- ending

    def copied(self, copies: Sequence[CopyOut], seconds: float | None) -> None:
        """The copies were executed, in `seconds` all together."""
        share = seconds / len(copies) if seconds is not None and copies else 0.0
        for copy in copies:
            for save in self._copying.pop(copy.key):
                if save.lane.in_memory or save.dropped:
                    self._end(save, WriteResult(num_bytes=self._block_bytes), share)
                else:
                    self._write(save)
            self._drop_if_lost(copy.key)

    def _end(self, save: Save, result: WriteResult, seconds: float) -> None:
        self._held.discard(save)
        if save.buffer is not None:
            self._staging.give_back(save.buffer)
        if save.source is not None:
            source, entry = save.source
            source.tier.unpin(entry)
            self._num_pinned_sources -= 1
        lane, key = save.lane, save.key
        present = lane.tier.settle(save.reservation, result)
        if self._active.get((lane.tier.name, key)) is save:
            del self._active[lane.tier.name, key]
        if present:
            lane.stats.saved_blocks += 1
            lane.stats.store_bytes += self._block_bytes
            lane.stats.store_seconds += seconds
            lane.failed.pop(key, None)
            lane.recovered()
            if key == lane.probe:
                lane.probe = None
                self._retry(lane)
            self._tell(lane, key, saved=True)
        elif save.dropped or save.overdue:
            pass
        elif isinstance(result.error, RoomTakenError):
            lane.pending[key] = None
            lane.pending.move_to_end(key, last=False)
            self._drop_if_lost(key)
        else:
            self._failed(lane, key, result.error)

    def _failed(self, lane: Lane, key: BlockKey, error: Exception | None) -> None:
        lane.stats.failed_blocks += 1
        reason = "full" if isinstance(error, TierFullError) else type(error).__name__
        if isinstance(error, OSError) and error.errno is not None:
            reason = errno.errorcode.get(error.errno, reason)
        lane.skipped[reason] += 1
        lane.note(key, SAVE_FAILED)
        if key in self.resident or self._memory_source(key):
            lane.failed[key] = None
            lane.retry_later()
        self._tell(lane, key, saved=False)

    def expire(self) -> None:
        """Count writes that hang beyond the deadline as failed. What they hold stays held until
        they return: the thread may still read it."""
        limit = time.monotonic() - self._write_deadline
        for save in list(self._active.values()):
            started = save.job.started if save.job is not None else None
            if started is not None and started < limit and not save.overdue:
                save.overdue = True
                del self._active[save.lane.tier.name, save.key]
                self._failed(save.lane, save.key, TimeoutError(errno.ETIMEDOUT, "write hangs"))

    def drop(self, lane: Lane, where: Forget | None) -> None:
        """The tier was reset: what was on its way is never to be seen there, nor what lies above
        or is on its way there, unless it is offered anew."""
        held = {
            key
            for key, (meta, _) in self.resident.items()
            if where is None or where.matches(key, meta.root_tag)
        }
        for other in self._lanes:
            if other.in_memory and other is not lane:
                held.update(other.tier.held(where))
        if where is None:
            lane.barred.clear()
        lane.barred |= held
        for key in [key for key in lane.failed if where is None or key in held]:
            del lane.failed[key]
        for key in [key for key in lane.pending if where is None or key in held]:
            del lane.pending[key]
            lane.note(key, RESET)
            self._tell(lane, key, saved=False)
        for (name, key), save in list(self._active.items()):
            meets = where is None or where.matches(key, save.meta.root_tag)
            if save.lane is lane and meets:
                save.dropped = True
                if save.job is not None:
                    save.job.cancelled = True
                del self._active[name, key]
                lane.note(key, RESET)
                self._tell(lane, key, saved=False)

    def metas(self) -> Iterator[tuple[BlockKey, BlockMeta]]:
        """Of what the device holds and of saves that have not ended."""
        yield from ((key, meta) for key, (meta, _) in self.resident.items())
        yield from ((save.key, save.meta) for save in self._held)

    def drop_lost(self) -> None:
        """Memory was reset: saves that were still to be made from it have no source any more."""
        for key in [key for lane in self._lanes for key in lane.pending]:
            self._drop_if_lost(key)

    # -- waiting and counting

    def tally(self) -> SaveTally:
        """Follow every save that is pending or under way now."""
        tally = SaveTally()
        for lane in self._lanes:
            tally.saved[lane.tier.name] = tally.failed[lane.tier.name] = 0
            tally.outstanding |= {(lane.tier.name, key) for key in lane.pending}
        tally.outstanding |= set(self._active)
        self._tallies.append(tally)
        return tally

    def give_up(self, tally: SaveTally, lane: Lane) -> None:
        """Count what a hung tier still owes as failed; it stays pending all the same."""
        for name, key in list(tally.outstanding):
            if name == lane.tier.name:
                tally.settle(name, key, saved=False)

    def untrack(self, tally: SaveTally) -> None:
        self._tallies.remove(tally)

    def _tell(self, lane: Lane, key: BlockKey, saved: bool) -> None:
        for tally in self._tallies:
            tally.settle(lane.tier.name, key, saved)

    def num_pending(self, lane: Lane) -> int:
        """Saves of a tier that have neither succeeded nor failed."""
        name = lane.tier.name
        return len(lane.pending) + sum(1 for active, _ in self._active if active == name)

    @property
    def idle(self) -> bool:
        return not (self._active or self._copying or any(lane.pending for lane in self._lanes))

    @property
    def num_buffers(self) -> int:
        """Staging buffers in use, by hung and overtaken saves too."""
        return sum(1 for save in self._held if save.buffer is not None)

    def num_pins(self, lane: Lane) -> int:
        """Pins that saves hold on a memory tier."""
        return sum(1 for save in self._held if save.source and save.source[0] is lane)
