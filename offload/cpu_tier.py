"""The CPU tier: one bounded arena of equal slots in anonymous memory."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Collection

from offload.block_index import BlockIndex
from offload.history import RESET, eviction, unheard
from offload.tier import (
    PIN_SHARE,
    BlockHash,
    BlockKey,
    BlockMeta,
    BlockState,
    Entry,
    Forget,
    MetasUnder,
    Reservation,
    TierOpenError,
    TierUsage,
    WriteResult,
)


class CpuTier:
    """Blocks in host memory.

    The arena is mapped at once and touched slot by slot, lowest first and reused slots before
    fresh ones, so memory never needed is never resident.

    Raises TierOpenError if it cannot hold one block or cannot be mapped.
    """

    in_memory = True
    ttl_seconds = 0.0

    def __init__(self, capacity_bytes: int, *, block_bytes: int, name: str = "cpu") -> None:
        num_slots = capacity_bytes // block_bytes
        if num_slots < 1:
            raise TierOpenError(
                f"{name} tier: {capacity_bytes} bytes hold no block of {block_bytes} bytes; "
                "give it more, or 0 for none"
            )
        try:
            self._arena = mmap.mmap(
                -1, num_slots * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except OSError as error:
            raise TierOpenError(
                f"{name} tier: cannot map {num_slots * block_bytes} bytes of memory "
                f"({error.strerror}); give it less"
            ) from error
        self.name = name
        self.capacity_bytes = capacity_bytes
        self._block_bytes = block_bytes
        self._num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._index = BlockIndex()
        self._num_dead = 0  # slots of dead entries that somebody still reads or fills
        self._num_saving = 0
        self._epoch = 0
        self._evicted = 0
        self._note: Callable[[BlockKey, str], None] = unheard

    def state(self, key: BlockKey) -> BlockState:
        return self._index.state(key)

    def present(self) -> list[BlockKey]:
        return self._index.present()

    def meta(self, key: BlockKey) -> BlockMeta | None:
        return self._index.get(key).meta

    def children(self, parent_hash: BlockHash) -> list[BlockKey]:
        return self._index.children(parent_hash)

    def entries(self) -> Collection[Entry]:
        return self._index.entries()

    def location(self, entry: Entry) -> None:
        return None

    def reserve(self, key: BlockKey, meta: BlockMeta | None) -> Reservation | None:
        if self._index.state(key) is not BlockState.ABSENT:
            raise ValueError(f"a save of a block that is {self._index.state(key).value}")
        evicted: tuple[Entry, ...] = ()
        if not self._free:
            victim = next(self._index.evictable(), None)
            if victim is None:
                return None
            self._index.begin_evict(victim)
            self._index.forget(victim)
            self._release(victim)
            self._evicted += 1
            self._note(victim.key, eviction(victim))
            evicted = (victim,)
        entry = Entry(key, self._block_bytes, meta, slot=self._free.pop())
        if meta is not None:
            entry.root_tag, entry.parent_tag = meta.root_tag, meta.parent_tag
        # What it will hold is unknown when a load promotes it: somebody asked for it again.
        entry.reused = meta is None
        self._index.begin_save(entry, None if meta is None else meta.parent_hash)
        self._num_saving += 1
        return Reservation(entry, self._epoch, evicted)

    def settle(self, reservation: Reservation, result: WriteResult) -> bool:
        entry = reservation.entry
        if not self._index.owns(entry):  # dropped meanwhile
            self._num_dead -= 1
            self._release(entry)
            return False
        self._num_saving -= 1
        if result.error is not None:
            self._index.forget(entry)
            self._release(entry)
            return False
        entry.meta = meta = result.meta or entry.meta
        if meta is not None:
            entry.root_tag, entry.parent_tag = meta.root_tag, meta.parent_tag
        entry.recency = time.time()
        self._index.publish(entry)
        return True

    def pin(self, key: BlockKey) -> Entry:
        return self._index.pin(key)

    def unpin(self, entry: Entry) -> None:
        self._index.unpin(entry)
        if not entry.pins and entry.state is BlockState.ABSENT:
            self._num_dead -= 1
            self._release(entry)

    def keep(self, key: BlockKey) -> Entry | None:
        return self._index.keep(key, int(PIN_SHARE * self.capacity_bytes))

    def let_go(self, entry: Entry) -> None:
        self._index.let_go(entry)

    def touch(self, key: BlockKey, again: bool = False) -> None:
        self._index.touch(key, time.time(), again)

    def age(self, key: BlockKey) -> None:
        self._index.age(key)

    def forget(self, entry: Entry) -> None:
        if self._index.owns(entry):
            self._index.forget(entry)
            self._bury(entry)

    def condemn(self, entry: Entry) -> int | None:
        self.forget(entry)
        return None

    def removed(self, entry: Entry, result: WriteResult) -> None:
        raise ValueError("memory has nothing to remove")

    def drop_all(self) -> int:
        held, saving = self._index.clear()
        for entry in held:
            self._bury(entry)
            self._note(entry.key, RESET)
        self._num_dead += len(saving)  # still being filled; `settle` gives the slot back
        self._num_saving = 0
        self._epoch += 1
        return len(held)

    def drop(self, where: Forget) -> int:
        held, saving = self._index.drop(where)
        for entry in held:
            self._bury(entry)
            self._note(entry.key, RESET)
        self._num_dead += len(saving)
        self._num_saving -= len(saving)
        return len(held)

    def held(self, where: Forget | None = None) -> list[BlockKey]:
        return self._index.held(where)

    def slot(self, entry: Entry) -> memoryview:
        assert entry.slot is not None
        start = entry.slot * self._block_bytes
        return memoryview(self._arena)[start : start + self._block_bytes]

    def begin_survey(self) -> None:
        return None

    def absorb(self, survey: object) -> None:
        raise ValueError("memory is not surveyed")

    def usage(self) -> TierUsage:
        return TierUsage(
            len(self._index), self._index.num_bytes, self._index.pinned_blocks, self._evicted
        )

    def num_pins(self) -> int:
        return self._index.num_pins

    def num_keeps(self) -> int:
        return self._index.num_keeps

    def watch(self, note: Callable[[BlockKey, str], None]) -> None:
        self._note = note

    def check(self) -> None:
        self._index.check()
        assert len(set(self._free)) == len(self._free), "a slot is free twice"
        used = len(self._index) + self._num_saving + self._num_dead
        assert used + len(self._free) == self._num_slots, "slots do not add up"
        kept = self._index.kept_bytes
        assert kept <= PIN_SHARE * self.capacity_bytes, "pins take more than their share"

    def write(self, reservation: Reservation, meta: BlockMeta, payload: memoryview) -> WriteResult:
        self.slot(reservation.entry)[:] = payload
        return WriteResult(num_bytes=self._block_bytes)

    def read(self, entry: Entry, into: memoryview) -> BlockMeta:
        if entry.meta is None:
            raise FileNotFoundError("the block is still being filled")
        into[:] = self.slot(entry)
        return entry.meta

    def read_meta(self, key: BlockKey) -> BlockMeta | None:
        entry = self._index.find(key)
        return None if entry is None else entry.meta

    def find_elsewhere(self, metas_under: MetasUnder) -> dict[int, str]:
        return {}  # memory is shared with nobody

    def remove(self, entry: Entry, epoch: int) -> WriteResult:
        raise ValueError("memory has nothing to remove")

    def survey(self, request: object) -> None:
        raise ValueError("memory is not surveyed")

    def wipe(self) -> None:
        """Memory is as durable as it gets."""

    def erase(self, where: Forget) -> None:
        """Memory is as durable as it gets."""

    def sync(self) -> None:
        """Memory is as durable as it gets."""

    def close(self) -> None:
        """The arena goes with the last view of it."""

    def _bury(self, entry: Entry) -> None:
        """Give the slot back, now or with the last pin."""
        if entry.pins:
            self._num_dead += 1
        else:
            self._release(entry)

    def _release(self, entry: Entry) -> None:
        assert entry.slot is not None
        self._free.append(entry.slot)
        entry.slot = None
