"""The disk tier: an index of verified block files, bounded by the bytes they occupy.

`used + extra <= capacity` holds before every write, where

    used  = PRESENT and EVICTING blocks + everything else found in the directory
    extra = for each save in flight, what it needs beyond the blocks that it evicts first

A save unlinks what it evicts before it writes, and no save counts on what another one evicts, so
the sum bounds the physical bytes at every instant and in every order of the I/O threads. Other
servers on the directory are seen by the survey only: between two of them they may add to it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from pathlib import Path

from offload.block_directory import BlockDirectory, Survey, SurveyRequest
from offload.block_file import BlockCorruptError, BlockName, record_bytes
from offload.block_index import BlockIndex
from offload.tier import (
    BlockHash,
    BlockKey,
    BlockMeta,
    BlockState,
    Entry,
    Reservation,
    StrangerFile,
    TierFullError,
    TierOpenError,
    TierUsage,
    WriteResult,
)

# A save may add one block to its two-digit directory and one to the fingerprint's.
_DIRECTORY_UNITS = 2


class DiskTier:
    """Blocks of one fingerprint in files. `DiskTier.open` creates or reopens the directory."""

    in_memory = False

    def __init__(
        self, directory: BlockDirectory, *, block_bytes: int, capacity_bytes: int, name: str
    ) -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes
        self._directory = directory
        self._block_bytes = block_bytes
        self._index = BlockIndex()
        self._epoch = 0
        self._touched: dict[BlockKey, float] = {}
        self._extra_bytes = 0  # of the saves in flight
        self._other_bytes = 0
        self._strangers: deque[StrangerFile] = deque()
        self._skipped: dict[str, int] = {}
        self._evicted = 0
        self._gone: set[BlockKey] = set()  # removed since the last survey was asked for
        self._reclaiming = False  # a reset's leftovers still count and will soon be gone

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        fingerprint: bytes,
        block_bytes: int,
        capacity_bytes: int,
        name: str = "disk",
    ) -> DiskTier:
        """Create or reopen the tier in `path` and index what it holds, by names and `stat` alone.

        Blocking, for startup. Raises TierOpenError.
        """
        if len(fingerprint) != 32:
            raise ValueError(f"a fingerprint of {len(fingerprint)} bytes, not 32")
        directory = BlockDirectory(path, fingerprint, block_bytes)
        tier = cls(directory, block_bytes=block_bytes, capacity_bytes=capacity_bytes, name=name)
        # The store's, the fingerprint's and a two-digit directory, each with room to grow.
        least = tier._needed_bytes(1) + 3 * directory.unit_bytes
        if capacity_bytes < least:
            directory.close()
            raise TierOpenError(
                f"{name} tier {path}: {capacity_bytes} bytes hold no block of {block_bytes} "
                f"bytes; give it at least {least}"
            )
        try:
            tier.absorb(directory.survey(tier.begin_survey()))
        except OSError as error:
            directory.close()
            raise TierOpenError(
                f"{name} tier {path}: {error.strerror}; make it readable or choose another "
                "directory"
            ) from error
        return tier

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

    def location(self, entry: Entry) -> str:
        return str(self._directory.path_of(_name(entry)))

    def slot(self, entry: Entry) -> memoryview:
        raise ValueError("blocks on disk have no memory")

    @property
    def _used_bytes(self) -> int:
        return self._index.num_bytes + self._other_bytes + self._extra_bytes

    def _needed_bytes(self, num_tokens: int) -> int:
        unit = self._directory.unit_bytes
        record = record_bytes(num_tokens, self._block_bytes)
        return -(-record // unit) * unit + _DIRECTORY_UNITS * unit

    def reserve(self, key: BlockKey, meta: BlockMeta | None) -> Reservation | None:
        if meta is None:
            raise ValueError("a block on disk records what it holds")
        if self._index.state(key) is not BlockState.ABSENT:
            raise ValueError(f"a save of a block that is {self._index.state(key).value}")
        needed = self._needed_bytes(len(meta.token_ids))
        excess = self._used_bytes + needed - self.capacity_bytes
        if excess > 0 and self._reclaiming:
            return None  # room will come without evicting what is new
        evicted, strangers, freed = self._choose_victims(excess)
        if freed < excess:
            if self._index.busy:
                return None
            raise TierFullError(
                f"{self.name} tier: {self._other_bytes} of {self.capacity_bytes} bytes are "
                "occupied by what may not be evicted"
            )
        for entry in evicted:
            self._index.begin_evict(entry)
        for _ in strangers:
            self._strangers.popleft()
        entry = Entry(key, 0, root_tag=meta.root_tag, parent_tag=meta.parent_tag)
        self._index.begin_save(entry)
        extra = max(0, needed - freed)
        self._extra_bytes += extra
        return Reservation(entry, self._epoch, tuple(evicted), tuple(strangers), extra)

    def _choose_victims(self, excess: int) -> tuple[list[Entry], list[StrangerFile], int]:
        """Least recently used first, ours and others' alike: a fingerprint no longer served
        makes way for ours, while servers that share the directory live by one clock."""
        evicted: list[Entry] = []
        strangers: list[StrangerFile] = []
        freed = 0
        own = self._index.evictable()
        next_own = next(own, None)
        others = iter(self._strangers)
        next_other = next(others, None)
        while freed < excess:
            if next_other is not None and (next_own is None or next_other.mtime < next_own.recency):
                strangers.append(next_other)
                freed += next_other.num_bytes
                next_other = next(others, None)
            elif next_own is not None:
                evicted.append(next_own)
                freed += next_own.num_bytes
                next_own = next(own, None)
            else:
                break
        return evicted, strangers, freed

    def settle(self, reservation: Reservation, result: WriteResult) -> bool:
        self._extra_bytes -= reservation.extra_bytes
        self._other_bytes = max(0, self._other_bytes + result.other_bytes)
        entry = reservation.entry
        if reservation.epoch != self._epoch:
            return False  # its file, if any, went with the directory that was renamed away
        for victim in reservation.evicted:
            if victim.key in result.removed:
                self._index.forget(victim)
                self._gone.add(victim.key)
                self._evicted += 1
            else:
                self._index.restore(victim)
        if result.error is not None:
            self._index.forget(entry)
            return False
        entry.num_bytes = result.num_bytes
        entry.recency = time.time()
        self._index.publish(entry)
        return True

    def pin(self, key: BlockKey) -> Entry:
        return self._index.pin(key)

    def unpin(self, entry: Entry) -> None:
        self._index.unpin(entry)

    def touch(self, key: BlockKey) -> None:
        now = time.time()
        if self._index.touch(key, now):
            self._touched[key] = now

    def forget(self, entry: Entry) -> None:
        # An EVICTING block is its remover's to forget.
        if self._index.owns(entry) and entry.state is BlockState.PRESENT:
            self._index.forget(entry)
            self._other_bytes += entry.num_bytes  # if still there; the next survey knows

    def condemn(self, entry: Entry) -> int | None:
        if not self._index.owns(entry) or entry.state is not BlockState.PRESENT:
            return None
        self._index.begin_evict(entry)
        return self._epoch

    def removed(self, entry: Entry, result: WriteResult) -> None:
        self._other_bytes = max(0, self._other_bytes + result.other_bytes)
        if self._index.owns(entry):
            self._index.forget(entry)
            if entry.key in result.removed:
                self._gone.add(entry.key)
            else:
                self._other_bytes += entry.num_bytes

    def drop_all(self) -> int:
        # The bytes stay until a survey has removed what `wipe` renames away.
        num_blocks = len(self._index)
        self._other_bytes += self._index.num_bytes
        self._index.clear()
        self._touched.clear()
        self._epoch += 1
        self._reclaiming = True
        return num_blocks

    def begin_survey(self) -> SurveyRequest:
        touched = {}
        for key, recency in self._touched.items():
            entry = self._index.find(key)
            if entry is not None:
                touched[_name(entry)] = recency
        self._touched = {}
        self._gone.clear()
        return SurveyRequest(self._epoch, self._index.stored(), touched)

    def absorb(self, survey: Survey) -> None:
        """Take over what a survey found. One of an older epoch says nothing about this one."""
        if survey.epoch != self._epoch:
            return
        self._other_bytes = survey.other_bytes
        self._strangers = deque(survey.strangers)
        self._skipped = survey.skipped
        self._reclaiming = False
        # A survey may have seen a file that was removed after it looked.
        self._index.adopt(found for found in survey.found if found.key not in self._gone)
        for entry in survey.vanished:
            if entry.state is BlockState.PRESENT and not entry.pins and self._index.owns(entry):
                self._index.forget(entry)

    def usage(self) -> TierUsage:
        return TierUsage(
            len(self._index),
            self._index.num_bytes,
            self._index.pinned_blocks,
            self._evicted,
            dict(self._skipped),
        )

    def num_pins(self) -> int:
        return self._index.num_pins

    def check(self) -> None:
        self._index.check()
        assert self._extra_bytes >= 0, "a save gave back more than it was charged"

    def write(self, reservation: Reservation, meta: BlockMeta, payload: memoryview) -> WriteResult:
        return self._directory.store(
            reservation.epoch,
            _name(reservation.entry),
            meta,
            payload,
            [_name(victim) for victim in reservation.evicted],
            reservation.strangers,
        )

    def read(self, entry: Entry, into: memoryview) -> BlockMeta:
        return self._directory.fetch(_name(entry), into)

    def read_meta(self, key: BlockKey) -> BlockMeta | None:
        entry = self._index.find(key)
        try:
            return None if entry is None else self._directory.fetch_meta(_name(entry))
        except (OSError, BlockCorruptError):
            return None

    def remove(self, entry: Entry, epoch: int) -> WriteResult:
        return self._directory.remove(epoch, _name(entry))

    def survey(self, request: SurveyRequest) -> Survey:
        return self._directory.survey(request)

    def wipe(self) -> None:
        self._directory.wipe(self._epoch)

    def sync(self) -> None:
        self._directory.sync()

    def close(self) -> None:
        self._directory.close()


def _name(entry: Entry) -> BlockName:
    return BlockName(entry.key, entry.root_tag, entry.parent_tag)
