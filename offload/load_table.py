"""Loads: from a ticket to the copy into a device block.

    memory:  READY --copy handed out--> COPYING --executed--> done
    disk:    WAITING --buffer--> READING --verified--> READY ...
                                    '--any error--> failed

A block on disk is read into a slot of the CPU tier, if there is one to be had, and stays there, so
promotion costs nothing; otherwise it goes through staging. The stored block is pinned from the
ticket on; where the bytes lie is held until the copy was executed. An abandoned load gives up what
it holds as soon as nothing reads or fills it any more, and no copy of it is handed out.
"""

from __future__ import annotations

import errno
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from offload.io_threads import Job, Urgency
from offload.lane import Lane
from offload.staging import Staging
from offload.tier import BlockKey, BlockState, Entry, Forget, Reservation, WriteResult
from offload.transfers import CopyIn


class Phase(Enum):
    """How far a load is."""

    WAITING = "waiting"
    READING = "reading"
    READY = "ready"
    COPYING = "copying"


@dataclass(slots=True, eq=False)
class Load:
    """One ticket."""

    ticket: int
    key: BlockKey
    block_id: int | None  # None: a promotion, which ends in the memory tier
    lane: Lane
    root_tag: bytes
    entry: Entry | None  # pinned in `lane`
    phase: Phase
    buffer: int | None = None
    slot: tuple[Lane, Entry] | None = None  # pinned in memory after promotion
    promotion: tuple[Lane, Reservation] | None = None
    job: Job | None = None
    abandoned: bool = False
    overtaken: bool = False  # by a reset of the tier it is read from: stays nowhere
    is_probe: bool = False  # read for the time it takes


class LoadTable:
    """All loads. Planner only; nothing blocks."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        staging: Staging,
        *,
        block_bytes: int,
        max_copies: int,
        evicted: Callable[[Sequence[Entry]], None],
        wake: Callable[[], None],
    ) -> None:
        self._lanes = lanes
        self._staging = staging
        self._block_bytes = block_bytes
        self._max_copies = max_copies
        self._evicted = evicted  # told what a promotion displaced
        self._wake = wake
        self._loads: dict[int, Load] = {}
        self._waiting: OrderedDict[int, Load] = OrderedDict()
        self._ready: OrderedDict[int, Load] = OrderedDict()
        self._abandoned: set[Load] = set()  # still READING
        self._failed: deque[int] = deque()
        self._next_ticket = 0

    def begin(self, lane: Lane, key: BlockKey, block_id: int | None) -> int:
        """A ticket for a load of a block that the tier holds. KeyError if it does not.

        Nothing is read yet: the promotion of one block may evict another that the same prefix is
        about to be loaded from, so all of them are pinned first.
        """
        assert block_id is not None or not lane.in_memory, "there is nothing to promote"
        entry = lane.tier.pin(key)
        self._next_ticket += 1
        phase = Phase.READY if lane.in_memory else Phase.WAITING
        load = Load(self._next_ticket, key, block_id, lane, entry.root_tag, entry, phase)
        self._loads[load.ticket] = load
        if lane.in_memory:
            self._ready[load.ticket] = load
            self._wake()
        else:
            lane.rate.begin(time.monotonic())
            self._waiting[load.ticket] = load
            self._wake()
        return load.ticket

    def start(self) -> None:
        """Give buffers to the loads that wait for one, oldest first."""
        while self._waiting:
            load = next(iter(self._waiting.values()))
            view = self._place(load)
            if view is None and load.block_id is not None:
                return
            del self._waiting[load.ticket]
            if view is None:
                load.lane.rate.end(time.monotonic(), None)
                self._fail(load)
            else:
                self._read(load, view)

    def probe(self, lane: Lane, keys: Sequence[BlockKey]) -> None:
        """Read blocks of a tier for nothing but the time it takes, as many as find buffers."""
        for key in keys:
            buffer = self._staging.take_for_load()
            if buffer is None:
                return
            entry = lane.tier.pin(key)
            load = Load(0, key, -1, lane, entry.root_tag, entry, Phase.READING, buffer)
            load.is_probe = load.abandoned = True  # from the start: nobody waits for it
            self._abandoned.add(load)
            lane.rate.begin(time.monotonic())
            self._read(load, self._staging.view(buffer))

    def _place(self, load: Load) -> memoryview | None:
        for lane in self._lanes:
            if lane is load.lane:
                break
            if lane.in_memory and lane.tier.state(load.key) is BlockState.ABSENT:
                reservation = lane.tier.reserve(load.key, None)
                if reservation is not None:
                    self._evicted(reservation.evicted)
                    assert load.entry is not None
                    reservation.entry.root_tag = load.entry.root_tag
                    load.promotion = (lane, reservation)
                    return lane.tier.slot(reservation.entry)
        if load.block_id is None:
            return None  # no memory to promote it into: that is all it was for
        load.buffer = self._staging.take_for_load()
        return None if load.buffer is None else self._staging.view(load.buffer)

    def _read(self, load: Load, view: memoryview) -> None:
        tier, entry = load.lane.tier, load.entry
        assert entry is not None
        load.phase = Phase.READING
        load.job = load.lane.threads.submit(
            lambda: tier.read(entry, view), Urgency.LOAD, lambda job: self._was_read(load, job)
        )

    def _was_read(self, load: Load, job: Job) -> None:
        lane, entry = load.lane, load.entry
        assert entry is not None
        whole = job.error is None and job.result is not None
        lane.rate.end(time.monotonic(), job.seconds if whole else None)
        load.entry = None
        lane.tier.unpin(entry)
        if whole:
            if not load.is_probe:
                lane.stats.loaded_blocks += 1
                lane.stats.load_bytes += self._block_bytes
                lane.stats.load_seconds += job.seconds
        elif job.error is not None:
            lane.discard_bad(entry, job.error)
        whole = self._promoted(load, job) and whole
        if load.abandoned:
            self._abandoned.discard(load)
            self._release(load)
        elif whole and load.block_id is None:
            del self._loads[load.ticket]
            self._release(load)
        elif whole:
            load.phase = Phase.READY
            self._ready[load.ticket] = load
        else:
            self._fail(load)
        self.start()

    def _promoted(self, load: Load, job: Job) -> bool:
        """Settle the slot that was read into; False if its bytes are lost with it."""
        if load.promotion is None:
            return True
        lane, reservation = load.promotion
        load.promotion = None
        error = job.error
        if error is None and (job.result is None or load.overtaken):
            error = OSError(errno.ECANCELED, "not started, or overtaken by a reset")
        result = WriteResult(error, self._block_bytes, meta=job.result)
        if not lane.tier.settle(reservation, result):
            return False
        lane.stats.saved_blocks += 1
        lane.stats.promoted_blocks += 1
        load.slot = (lane, lane.tier.pin(load.key))
        return True

    def hand_out(self) -> list[CopyIn]:
        """Copies to execute, oldest first, as many as one round should carry."""
        copies: list[CopyIn] = []
        while self._ready and len(copies) < self._max_copies:
            ticket, load = self._ready.popitem(last=False)
            load.phase = Phase.COPYING
            assert load.block_id is not None, "a promotion has no copy"
            copies.append(CopyIn(ticket, load.key, load.block_id, self._source(load)))
        return copies

    def _source(self, load: Load) -> memoryview:
        if load.buffer is not None:
            return self._staging.view(load.buffer)
        lane, entry = load.slot or (load.lane, load.entry)
        assert entry is not None
        return lane.tier.slot(entry)

    def copied(self, copies: Sequence[CopyIn], seconds: float | None) -> None:
        """The copies were executed, in `seconds` all together."""
        from_memory = []
        for copy in copies:
            load = self._loads.pop(copy.ticket)
            if load.lane.in_memory:
                from_memory.append(load)
            self._release(load)
        share = seconds / len(copies) if seconds is not None and copies else None
        for load in from_memory:
            stats = load.lane.stats
            stats.loaded_blocks += 1
            stats.load_bytes += self._block_bytes
            if share is not None:
                stats.load_seconds += share
                load.lane.rate.measured(share, 1)
        self.start()

    def in_flight(self, ticket: int) -> bool:
        return ticket in self._loads

    def cancel(self, ticket: int) -> None:
        """Abandon a load; nothing for a ticket that has ended or whose copy is handed out."""
        load = self._loads.get(ticket)
        if load is None:
            with suppress(ValueError):
                self._failed.remove(ticket)
            return
        self._abandon(load)

    def fail_all(self, lane: Lane, where: Forget | None) -> None:
        """The tier was reset: loads from it that are not being copied yet have failed."""
        for load in list(self._loads.values()):
            holds = load.lane is lane or (load.slot and load.slot[0] is lane)
            meets = where is None or where.matches(load.key, load.root_tag)
            if holds and meets and load.phase is not Phase.COPYING:
                load.overtaken = True
                self._abandon(load)
                self._failed.append(load.ticket)
                self._wake()

    def _abandon(self, load: Load) -> None:
        if load.phase is Phase.COPYING:
            return  # whoever copies reports it; only then may the bytes go
        del self._loads[load.ticket]
        if load.phase is Phase.READING:
            load.abandoned = True
            self._abandoned.add(load)
            assert load.job is not None
            load.job.cancelled = True
            return
        if load.phase is Phase.WAITING:
            del self._waiting[load.ticket]
            load.lane.rate.end(time.monotonic(), None)
        else:
            del self._ready[load.ticket]
        self._release(load)

    def _fail(self, load: Load) -> None:
        del self._loads[load.ticket]
        self._failed.append(load.ticket)
        self._release(load)

    def _release(self, load: Load) -> None:
        if load.buffer is not None:
            self._staging.give_back(load.buffer)
            load.buffer = None
        if load.slot is not None:
            lane, entry = load.slot
            lane.tier.unpin(entry)
            load.slot = None
        if load.entry is not None:
            load.lane.tier.unpin(load.entry)
            load.entry = None

    def take_failed(self) -> list[int]:
        failed = list(self._failed)
        self._failed.clear()
        return failed

    @property
    def has_news(self) -> bool:
        """Whether a round would hand something out."""
        return bool(self._ready or self._failed)

    @property
    def idle(self) -> bool:
        return not (self._loads or self._abandoned or self._failed)

    @property
    def num_buffers(self) -> int:
        """Staging buffers in use."""
        return sum(1 for load in self._all() if load.buffer is not None)

    def num_pins(self, lane: Lane) -> int:
        """Pins that loads hold in a tier."""
        pins = sum(1 for load in self._all() if load.lane is lane and load.entry is not None)
        return pins + sum(1 for load in self._all() if load.slot and load.slot[0] is lane)

    def _all(self) -> list[Load]:
        return [*self._loads.values(), *self._abandoned]
