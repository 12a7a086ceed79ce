"""The disk tier: an index of verified block files, bounded by the bytes they occupy.

`used + extra <= capacity` holds before every write, where

    used  = PRESENT and EVICTING blocks + everything else found in the directory
    extra = for each save in flight, what it needs beyond the blocks that it evicts first

A save unlinks what it evicts before it writes, and no save counts on what another one evicts, so
the sum bounds the physical bytes at every instant and in every order of the I/O threads. What other
servers on the directory add is seen by the next survey; until then the ledger refuses a write that
would not fit beside it, and the next one evicts more.

Where the file system has less left than the cap, what is least valuable makes way as well.
"""

from __future__ import annotations

import errno
import gc
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from offload.block_directory import BlockDirectory
from offload.block_file import BlockCorruptError, BlockName
from offload.block_index import BlockIndex
from offload.history import EXPIRED, LOST, RESET, eviction, unheard
from offload.store_survey import Survey, SurveyRequest
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
    RoomTakenError,
    StrangerFile,
    TierFullError,
    TierOpenError,
    TierUsage,
    WriteResult,
)

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Everything that opening a large store makes is kept: looking through it for garbage, again
    and again as it grows, finds none and took a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class DiskTier:
    """Blocks of one fingerprint in files. `DiskTier.open` creates or reopens the directory."""

    in_memory = False

    def __init__(
        self,
        directory: BlockDirectory,
        *,
        block_bytes: int,
        capacity_bytes: int,
        ttl_seconds: float,
        name: str,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.ttl_seconds = ttl_seconds
        self._clock = clock
        self._directory = directory
        self._block_bytes = block_bytes
        self._index = BlockIndex()
        self._epoch = 0
        self._num_drops = 0
        self._touched: dict[BlockKey, float] = {}
        self._extra_bytes = 0  # of the saves in flight
        self._other_bytes = 0
        self._strangers: deque[StrangerFile] = deque()
        self._skipped: dict[str, int] = {}
        self._evicted = 0
        self._expired = 0
        self._limit_bytes: float = math.inf  # what the file system has room for
        self._outrun = False  # what was evicted for its sake did not help
        self._gone: set[BlockKey] = set()  # removed since the last survey was asked for
        self._reclaiming = False  # a reset's leftovers still count and will soon be gone
        self._note: Callable[[BlockKey, str], None] = unheard

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        fingerprint: bytes,
        block_bytes: int,
        capacity_bytes: int,
        ttl_seconds: float = 0.0,
        side_bytes: int = 0,
        name: str = "disk",
        clock: Callable[[], float] = time.time,
    ) -> DiskTier:
        """Create or reopen the tier in `path` and index what it holds, by names and `stat` alone.

        With `ttl_seconds`, a block unused for longer counts as none and its file is removed.
        `side_bytes` are claimed for the side store, which grows unseen between two surveys.
        Blocking, for startup, in any thread. Raises TierOpenError.
        """
        if len(fingerprint) != 32:
            raise ValueError(f"a fingerprint of {len(fingerprint)} bytes, not 32")
        directory = BlockDirectory(path, fingerprint, block_bytes, capacity_bytes, side_bytes)
        tier = cls(
            directory,
            block_bytes=block_bytes,
            capacity_bytes=capacity_bytes,
            ttl_seconds=ttl_seconds,
            name=name,
            clock=clock,
        )
        # The ledger, and the store's, the fingerprint's and a two-digit directory, with room to
        # grow.
        least = directory.needed_bytes(1) + 4 * directory.unit_bytes + side_bytes
        if capacity_bytes < least:
            directory.close()
            raise TierOpenError(
                f"{name} tier {path}: {capacity_bytes} bytes hold no block of {block_bytes} "
                f"bytes; give it at least {least}"
            )
        try:
            with _collector_at_rest():
                tier.absorb(directory.survey(tier.begin_survey()))
        except OSError as error:
            directory.close()
            raise TierOpenError(
                f"{name} tier {path}: {error.strerror}; make it readable or choose another "
                "directory"
            ) from error
        return tier

    def state(self, key: BlockKey) -> BlockState:
        entry = self._index.find(key)
        if entry is not None and self._is_expired(entry, self._expire_before()):
            self._expire(entry)
        return self._index.state(key)

    @staticmethod
    def _is_expired(entry: Entry, before: float) -> bool:
        """Neither a pin of a moment nor one that lasts keeps it, and it is not going already."""
        is_held = entry.pins or entry.keeps or entry.state is not BlockState.PRESENT
        return not is_held and entry.recency < before

    def _expire_before(self) -> float:
        return self._clock() - self.ttl_seconds if self.ttl_seconds else -math.inf

    def _expire(self, entry: Entry) -> None:
        """PRESENT -> ABSENT; the next survey removes the file."""
        self.forget(entry)
        self._expired += 1
        self._note(entry.key, EXPIRED)

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

    def reserve(self, key: BlockKey, meta: BlockMeta | None) -> Reservation | None:
        if meta is None:
            raise ValueError("a block on disk records what it holds")
        state = self.state(key)
        if state is not BlockState.ABSENT:
            raise ValueError(f"a save of a block that is {state.value}")
        needed = self._directory.needed_bytes(len(meta.token_ids))
        excess = self._used_bytes + needed - self.capacity_bytes
        if excess > 0 and self._reclaiming:
            return None  # room will come without evicting what is new
        evicted, strangers, freed = self._choose_victims(max(excess, self._lacking(needed)))
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
        self._index.begin_save(entry, meta.parent_hash)
        extra = max(0, needed - freed)
        self._extra_bytes += extra
        return Reservation(entry, self._epoch, tuple(evicted), tuple(strangers), extra)

    def _lacking(self, needed: int) -> float:
        """What the file system, not the cap, asks to evict. Where that did not help, somebody else
        takes what is freed: then a write is only tried, so that a fault costs no stored block."""
        if self._outrun:
            return 0
        return self._used_bytes + needed - self._limit_bytes

    def _choose_victims(self, excess: float) -> tuple[list[Entry], list[StrangerFile], int]:
        """Ours in their order, others' by recency, and of the two next ones the less recently used:
        a fingerprint no longer served makes way for ours, while servers that share the directory
        live by one clock. What is superseded goes first, whoever wrote beside it."""
        evicted: list[Entry] = []
        strangers: list[StrangerFile] = []
        freed = 0
        own = self._index.evictable()
        next_own = next(own, None)
        others = iter(self._strangers)
        next_other = next(others, None)
        while freed < excess:
            if next_other is not None and (
                next_own is None
                or (not next_own.superseded and next_other.mtime < next_own.recency)
            ):
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
        self._heed(reservation, result.error)
        for victim in reservation.evicted:
            if not self._index.owns(victim):  # dropped meanwhile
                if victim.key in result.removed:
                    self._other_bytes = max(0, self._other_bytes - victim.num_bytes)
            elif victim.key in result.removed:
                self._index.forget(victim)
                self._gone.add(victim.key)
                self._evicted += 1
                self._note(victim.key, eviction(victim))
            else:
                self._index.restore(victim)
        if not self._index.owns(entry):
            self._other_bytes += result.num_bytes  # dropped meanwhile, and erased by now
            return False
        if result.error is not None:
            self._index.forget(entry)
            return False
        entry.num_bytes = result.num_bytes
        entry.recency = self._clock()
        self._index.publish(entry)
        if self._used_bytes > self._limit_bytes:
            self._limit_bytes = math.inf  # it has more room than it had
        return True

    def _heed(self, reservation: Reservation, error: Exception | None) -> None:
        """Learn from a write that is settled how much room there is."""
        if error is None:
            self._outrun = False
        elif isinstance(error, RoomTakenError):
            # One block more at least, so that trying again comes to an end.
            unseen = error.occupied_bytes - self._used_bytes
            self._other_bytes += max(unseen, self._block_bytes)
        elif isinstance(error, OSError) and error.errno in _FULL:
            self._outrun |= bool(reservation.evicted or reservation.strangers)
            self._limit_bytes = self._used_bytes

    def pin(self, key: BlockKey) -> Entry:
        return self._index.pin(key)  # one that expires just now was still promised by `state`

    def unpin(self, entry: Entry) -> None:
        self._index.unpin(entry)

    def keep(self, key: BlockKey) -> Entry | None:
        return self._index.keep(key, int(PIN_SHARE * self.capacity_bytes))

    def let_go(self, entry: Entry) -> None:
        self._index.let_go(entry)

    def touch(self, key: BlockKey, again: bool = False) -> None:
        now = self._clock()
        if self.state(key) is BlockState.PRESENT and self._index.touch(key, now, again):
            self._touched[key] = now

    def age(self, key: BlockKey) -> None:
        self._index.age(key)

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
        for entry in self._index.clear()[0]:
            self._note(entry.key, RESET)
        self._touched.clear()
        self._epoch += 1
        self._reclaiming = True
        return num_blocks

    def drop(self, where: Forget) -> int:
        num_blocks = len(self._index)
        held, _ = self._index.drop(where)
        self._other_bytes += sum(entry.num_bytes for entry in held)
        for entry in held:
            self._note(entry.key, RESET)
        self._num_drops += 1
        self._reclaiming = True
        return num_blocks - len(self._index)

    def held(self, where: Forget | None = None) -> list[BlockKey]:
        return self._index.held(where)

    def begin_survey(self) -> SurveyRequest:
        touched = {}
        for key, recency in self._touched.items():
            entry = self._index.find(key)
            if entry is not None:
                touched[_name(entry)] = recency
        self._touched = {}
        self._gone.clear()
        before = self._expire_before()
        if self.ttl_seconds:
            for entry in self._index.stored().values():
                if self._is_expired(entry, before):
                    self._expire(entry)
        known = self._index.stored()
        return SurveyRequest(self._epoch, self._num_drops, known, touched, before)

    def absorb(self, survey: Survey) -> None:
        """Take over what a survey found. One begun before a reset says nothing about what is
        left."""
        if (survey.epoch, survey.num_drops) != (self._epoch, self._num_drops):
            return
        self._other_bytes = survey.other_bytes
        self._strangers = deque(survey.strangers)
        self._skipped = survey.skipped
        self._reclaiming = False
        # A survey may have seen a file that was removed after it looked.
        found = survey.found
        if self._gone or self.ttl_seconds:
            before, gone = self._expire_before(), self._gone
            found = [one for one in found if one.key not in gone and one.mtime >= before]
        self._index.adopt(found)
        for entry in survey.vanished:
            if entry.state is BlockState.PRESENT and not entry.pins and self._index.owns(entry):
                self._index.forget(entry)
                self._note(entry.key, LOST)
        self._limit_bytes = self._used_bytes + survey.free_bytes
        if survey.free_bytes >= self._directory.needed_bytes(1):
            self._outrun = False

    def usage(self) -> TierUsage:
        return TierUsage(
            len(self._index),
            self._index.num_bytes,
            self._index.pinned_blocks,
            self._evicted,
            {**self._skipped, **({"expired": self._expired} if self._expired else {})},
        )

    def num_pins(self) -> int:
        return self._index.num_pins

    def num_keeps(self) -> int:
        return self._index.num_keeps

    def watch(self, note: Callable[[BlockKey, str], None]) -> None:
        self._note = note

    def check(self) -> None:
        self._index.check()
        assert self._extra_bytes >= 0, "a save gave back more than it was charged"
        kept = self._index.kept_bytes
        assert kept <= PIN_SHARE * self.capacity_bytes, "pins take more than their share"

    def write(self, reservation: Reservation, meta: BlockMeta, payload: memoryview) -> WriteResult:
        return self._directory.store(
            reservation.epoch,
            _name(reservation.entry),
            meta,
            payload,
            [_name(victim) for victim in reservation.evicted],
            reservation.strangers,
            wanted=lambda: reservation.entry.state is BlockState.SAVING,
        )

    def read(self, entry: Entry, into: memoryview) -> BlockMeta:
        return self._directory.fetch(_name(entry), into)

    def read_meta(self, key: BlockKey) -> BlockMeta | None:
        entry = self._index.find(key)
        try:
            return None if entry is None else self._directory.fetch_meta(_name(entry))
        except (OSError, BlockCorruptError):
            return None

    def find_elsewhere(self, metas_under: MetasUnder) -> dict[int, str]:
        return self._directory.find_elsewhere(metas_under)

    def remove(self, entry: Entry, epoch: int) -> WriteResult:
        return self._directory.remove(epoch, _name(entry))

    def survey(self, request: SurveyRequest) -> Survey:
        return self._directory.survey(request)

    def wipe(self) -> None:
        self._directory.wipe(self._epoch)

    def erase(self, where: Forget) -> None:
        self._directory.erase(where)

    def sync(self) -> None:
        self._directory.sync()

    def close(self) -> None:
        self._directory.close()


def _name(entry: Entry) -> BlockName:
    return BlockName(entry.key, entry.root_tag, entry.parent_tag)
