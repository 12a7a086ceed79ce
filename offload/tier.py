"""What a tier is: an index that only the planner changes, and blocking work that it never does.

    planner                                    I/O thread
    -------                                    ----------
    reserve   ABSENT  -> SAVING                write    bytes to the medium, evicted blocks first
    settle    SAVING  -> PRESENT | ABSENT
    pin       PRESENT, not evictable           read     bytes from the medium, verified
    unpin
    keep      PRESENT, not evictable, at length
    let_go
    condemn   PRESENT -> EVICTING              remove   a block found bad
    removed   EVICTING -> ABSENT
    drop_all  everything -> ABSENT             wipe     the same, durably
    drop      some chains -> ABSENT            erase    the same, durably
    begin_survey, absorb                       survey   what the medium really holds

Between `reserve` and `settle` a block is invisible and its room is taken; between `pin` and
`unpin` its bytes stay where they are. Nothing here waits: a tier that has no room now says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple, NewType, Protocol

BlockHash = NewType("BlockHash", bytes)  # 32 bytes, chained from the model fingerprint
PIN_SHARE = 0.5  # of a tier's capacity, at most: the rest must go on taking new blocks
TAG_BYTES = 8  # of a root's or a parent's hash: enough to find, the record holds the whole


class BlockKey(NamedTuple):
    """Names a stored block: chained hash and KV group."""

    block_hash: BlockHash
    group: int


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """What a block claims to hold; recorded beside its bytes."""

    parent_hash: BlockHash
    token_ids: tuple[int, ...]
    root_hash: BlockHash  # of its chain: the parent of the first block

    @property
    def root_tag(self) -> bytes:
        """The beginning of the root's hash, as an index and a file name carry it."""
        return self.root_hash[:TAG_BYTES]

    @property
    def parent_tag(self) -> bytes:
        return self.parent_hash[:TAG_BYTES]


# From a fingerprint to what a chain of blocks would be under it, root first.
MetasUnder = Callable[[bytes], Sequence[tuple[BlockKey, BlockMeta]]]


class BlockState(Enum):
    """Where a block stands in one tier."""

    ABSENT = "absent"
    SAVING = "saving"
    PRESENT = "present"
    EVICTING = "evicting"


class OffloadError(Exception):
    """Base of the errors that `offload` raises on purpose.

    OffloadError
    |-- TierOpenError      the tier cannot be used at all; names path, cause and mend
    |-- TierFullError      this block cannot fit, whatever finishes or is evicted
    |-- RoomTakenError     others have taken the room of this block: evict more and try again
    '-- block_file.BlockCorruptError    a stored record that is not what it should be
    """


class TierOpenError(OffloadError):
    """A tier cannot be created, opened or written; the message names path, cause and mend."""


class TierFullError(OffloadError):
    """The block has no room even when everything that may be evicted is."""


class RoomTakenError(OffloadError):
    """Other writers on a shared medium have taken the room that a block was to have."""

    def __init__(self, occupied_bytes: int) -> None:
        super().__init__(f"{occupied_bytes} bytes are occupied by now")
        self.occupied_bytes = occupied_bytes


@dataclass(slots=True, eq=False)
class Entry:
    """One block in a tier's index. Compared by identity, so it also serves as the handle of a
    pin or a reservation: after a reset, an old handle never touches a newer block of its key."""

    key: BlockKey
    num_bytes: int  # what it occupies on the medium
    meta: BlockMeta | None = None
    slot: int | None = None  # arena slot, memory tiers only
    recency: float = 0.0  # seconds since the epoch of its last use
    pins: int = 0
    state: BlockState = BlockState.SAVING
    root_tag: bytes = b""  # of the root's hash the first TAG_BYTES; empty while unknown
    parent_tag: bytes = b""
    keeps: int = 0  # pins that last, see `Tier.keep`
    reused: bool = False  # asked for by a later request, or continuing a chain that was
    superseded: bool = False  # of a branch that its conversation has left


class FoundBlock(NamedTuple):
    """A stored block that the index does not know yet."""

    key: BlockKey
    root_tag: bytes
    parent_tag: bytes
    num_bytes: int
    mtime: float


@dataclass(frozen=True)
class Forget:
    """Which blocks a selective reset is about: whole chains by their root, and single blocks."""

    roots: frozenset[BlockHash] = frozenset()
    keys: frozenset[BlockKey] = frozenset()

    @cached_property
    def _root_tags(self) -> frozenset[bytes]:
        return frozenset(root[:TAG_BYTES] for root in self.roots)

    def matches(self, key: BlockKey, root_tag: bytes) -> bool:
        """Whether it is about this block."""
        return key in self.keys or root_tag in self._root_tags

    def without(self, other: Forget) -> Forget:
        """What of it `other` does not name in the same way."""
        return Forget(self.roots - other.roots, self.keys - other.keys)


class StrangerFile(NamedTuple):
    """A block file on the shared medium that is not in our index."""

    fingerprint: str  # hex; names its directory
    name: str
    num_bytes: int
    mtime: float


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Room for one block, and what must go before it is written."""

    entry: Entry
    epoch: int  # number of resets before it
    evicted: tuple[Entry, ...] = ()
    strangers: tuple[StrangerFile, ...] = ()
    extra_bytes: int = 0  # charged beyond what the evicted leave


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What `write` did. Without an error the block is stored whole."""

    error: Exception | None = None
    num_bytes: int = 0  # what the stored block occupies
    removed: frozenset[BlockKey] = frozenset()  # evicted blocks that are gone
    other_bytes: int = 0  # change in bytes of strangers and directories
    meta: BlockMeta | None = None


@dataclass(frozen=True, slots=True)
class TierUsage:
    """An index at a glance; `check` has verified nothing."""

    blocks: int
    num_bytes: int
    pinned_blocks: int
    evicted_blocks: int
    skipped: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class TierStats:
    """Counters (monotonic) and gauges of one tier; bytes and seconds."""

    blocks: int = 0
    bytes: int = 0
    capacity_bytes: int = 0
    pinned_blocks: int = 0
    pending_saves: int = 0
    saved_blocks: int = 0
    evicted_blocks: int = 0
    failed_blocks: int = 0
    loaded_blocks: int = 0
    load_bytes: int = 0
    load_seconds: float = 0.0
    store_bytes: int = 0
    store_seconds: float = 0.0
    skipped: dict[str, int] = field(default_factory=dict)
    verify_failures: int = 0
    promoted_blocks: int = 0  # loads from below that stayed here; among the saved ones, too


class Tier(Protocol):
    """One place below the device where blocks may live. See the module docstring for the verbs.

    The first group of methods belongs to the planner and never blocks; the second runs on I/O
    threads, takes and returns plain data and never looks at the index.
    """

    @property
    def name(self) -> str: ...
    @property
    def capacity_bytes(self) -> int: ...
    @property
    def ttl_seconds(self) -> float:
        """For how long a block is held that nobody uses; 0: for ever."""

    @property
    def in_memory(self) -> bool:
        """Whether blocks are addressable: `slot` then replaces `write` and `read`."""

    def state(self, key: BlockKey) -> BlockState: ...
    def present(self) -> list[BlockKey]:
        """PRESENT blocks, least recently used first."""

    def meta(self, key: BlockKey) -> BlockMeta | None:
        """What a PRESENT block claims to hold, if this tier remembers it."""

    def children(self, parent_hash: BlockHash) -> list[BlockKey]:
        """PRESENT blocks that follow this one or this root, by the beginning of its hash."""

    def entries(self) -> Collection[Entry]:
        """Of all PRESENT and EVICTING blocks; to be looked at, not changed."""

    def location(self, entry: Entry) -> str | None:
        """Where a person finds a stored block; None in memory."""

    def reserve(self, key: BlockKey, meta: BlockMeta | None) -> Reservation | None:
        """ABSENT -> SAVING, evicting as needed. None: no room now, ask again.

        Raises TierFullError when asking again cannot help, ValueError if not ABSENT.
        """

    def settle(self, reservation: Reservation, result: WriteResult) -> bool:
        """SAVING -> PRESENT, or ABSENT after an error. True iff the block is now PRESENT."""

    def pin(self, key: BlockKey) -> Entry:
        """Keep a PRESENT block where it is. KeyError if it is not PRESENT."""

    def unpin(self, entry: Entry) -> None: ...
    def keep(self, key: BlockKey) -> Entry | None:
        """Do not evict a block until `let_go`, a reset or a failed verification. None if it is not
        PRESENT, or if more than PIN_SHARE of the capacity would be kept."""

    def let_go(self, entry: Entry) -> None:
        """Undo a `keep`; nothing for a block that has been lost since."""

    def touch(self, key: BlockKey, again: bool = False) -> None:
        """Most recently used now, and `again` if not by the request that stored it; nothing for a
        block that is not PRESENT."""

    def age(self, key: BlockKey) -> None:
        """Superseded: to be evicted before all that are not; nothing for a block that is kept or
        not PRESENT."""

    def forget(self, entry: Entry) -> None:
        """PRESENT -> ABSENT for a block whose bytes are gone or cannot be read."""

    def condemn(self, entry: Entry) -> int | None:
        """PRESENT -> EVICTING for a block found bad; the epoch for `remove`, or None if it has
        nothing to remove."""

    def removed(self, entry: Entry, result: WriteResult) -> None:
        """EVICTING -> ABSENT."""

    def drop_all(self) -> int:
        """Everything ABSENT at once, SAVING included; number of PRESENT blocks dropped."""

    def drop(self, where: Forget) -> int:
        """The same for some chains only."""

    def held(self, where: Forget | None = None) -> list[BlockKey]:
        """PRESENT and SAVING blocks, all or some chains' only."""

    def slot(self, entry: Entry) -> memoryview:
        """The memory of a pinned or reserved block, block_bytes long."""

    def begin_survey(self) -> Any | None:
        """What `survey` needs, or None when there is nothing to look at."""

    def absorb(self, survey: Any) -> None: ...
    def usage(self) -> TierUsage: ...
    def num_pins(self) -> int:
        """Pins not yet released, on entries that a reset took out too."""

    def num_keeps(self) -> int:
        """How often PRESENT blocks are kept."""

    def watch(self, note: Callable[[BlockKey, str], None]) -> None:
        """Tell `note` of every block that goes without having been asked to: which, and how, in
        the words of `history`."""

    def check(self) -> None:
        """AssertionError if a conservation law is broken."""

    def write(
        self, reservation: Reservation, meta: BlockMeta, payload: memoryview
    ) -> WriteResult: ...
    def read(self, entry: Entry, into: memoryview) -> BlockMeta:
        """Fill `into`, verified. Raises BlockCorruptError, FileNotFoundError, OSError."""

    def read_meta(self, key: BlockKey) -> BlockMeta | None:
        """What a PRESENT block claims to hold, verified; None if it cannot be told."""

    def find_elsewhere(self, metas_under: MetasUnder) -> dict[int, str]:
        """Which of these blocks another fingerprint holds here: index and fingerprint (hex)."""

    def remove(self, entry: Entry, epoch: int) -> WriteResult: ...
    def survey(self, request: Any) -> Any: ...
    def wipe(self) -> None:
        """Make the last `drop_all` durable. OSError if it could not be."""

    def erase(self, where: Forget) -> None:
        """Make a `drop` durable. OSError if it could not be."""

    def sync(self) -> None:
        """Everything settled so far survives a power cut. OSError if it may not."""

    def close(self) -> None: ...


def chain_order(keys: Sequence[BlockKey]) -> list[BlockKey]:
    """Keys of a chain, root first, in the order to touch them: a chain that loses its root is
    worthless, one that loses its tail only shorter, so the root must be the last touched."""
    return list(reversed(keys))
