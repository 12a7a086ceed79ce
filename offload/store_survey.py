"""What a survey is asked and what it answers: a walk over the store, summed up for one tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter

from offload import block_file
from offload.block_file import BlockName
from offload.draft import charged_bytes
from offload.side_claim import SideClaims
from offload.store_scan import Kind, StoreFile, scan
from offload.tier import BlockKey, Entry, FoundBlock, StrangerFile

_MAX_STRANGERS = 8192  # eviction candidates a survey names; more come with the next


def future_bytes(file: StoreFile, unit_bytes: int) -> int:
    """What a file occupies, or will when its writer is done."""
    if file.kind is not Kind.TEMPORARY:
        return file.physical_bytes
    return max(file.physical_bytes, charged_bytes(file.size_bytes, unit_bytes))


def measure_store(dir_fd: int, unit_bytes: int) -> int:
    """What all that lies in the directory behind `dir_fd` occupies, or will when those who write
    are done and side files are as large as was claimed. Raises OSError."""
    claims, total = SideClaims(dir_fd), 0
    for file in scan(dir_fd):
        if file.kind is Kind.SIDE:
            claims.add(file)
        total += future_bytes(file, unit_bytes)
    return total + claims.growth


@dataclass(frozen=True, slots=True)
class SurveyRequest:
    """What the planner knows before a survey."""

    epoch: int
    num_drops: int  # selective resets before it
    known: Mapping[BlockKey, Entry]  # the entries are only handed back
    touched: Mapping[BlockName, float]  # seconds since the epoch, to be recorded as mtime
    expire_before: float  # of ours, what was last used before and is not known, may be removed


@dataclass(frozen=True, slots=True)
class Survey:
    """What lies in the directory beside the blocks already known; bytes are physical."""

    epoch: int
    num_drops: int
    found: list[FoundBlock]  # ours, not known; oldest first
    vanished: list[Entry]  # known, not there
    strangers: list[StrangerFile]  # may be evicted; oldest first
    other_bytes: int  # all that is neither known nor found, strangers and directories included
    skipped: dict[str, int]
    free_bytes: int  # that the file system has left
    seconds: float


class Inventory:
    """Sums up a scan for one fingerprint."""

    def __init__(self, fingerprint: str, block_bytes: int, known: Mapping[BlockKey, Entry]) -> None:
        self._fingerprint = fingerprint
        self._block_bytes = block_bytes
        self._known = known
        self._seen: set[BlockKey] = set()
        self._found: dict[BlockKey, FoundBlock] = {}
        self._root_tags: dict[bytes, bytes] = {}  # one object for all blocks of a chain
        self._strangers: list[StrangerFile] = []
        self._other_bytes = 0
        self._skipped: dict[str, int] = {}

    def expires(self, file: StoreFile, before: float) -> bool:
        """Whether a file is a block of ours that nobody has used since."""
        if file.block is None or file.fingerprint != self._fingerprint or file.mtime >= before:
            return False
        return file.block.key not in self._known

    def add(self, file: StoreFile) -> None:
        if file.kind is Kind.BLOCK and self._is_ours(file):
            return
        if file.kind is Kind.OUTDATED:
            self._skip("version")
        elif file.kind is Kind.FOREIGN:
            self._skip("foreign")
        if file.kind in (Kind.BLOCK, Kind.OUTDATED):
            assert file.fingerprint is not None
            name = file.path.rsplit("/", 1)[1]
            self._strangers.append(
                StrangerFile(file.fingerprint, name, file.physical_bytes, file.mtime)
            )
        self._other_bytes += file.physical_bytes

    def adjust(self, num_bytes: int) -> None:
        """Directories have changed by this much since they were added, or side files may."""
        self._other_bytes += num_bytes

    def _is_ours(self, file: StoreFile) -> bool:
        """Whether a BLOCK is known or found; if not, it is counted as skipped."""
        if file.fingerprint != self._fingerprint:
            self._skip("fingerprint")
            return False
        assert file.block is not None
        key, root_tag, parent_tag = file.block
        entry = self._known.get(key)
        if entry is not None:
            if (entry.root_tag, entry.parent_tag) == (root_tag, parent_tag):
                self._seen.add(key)
                return True
            self._skip("name")
            return False
        header = file.size_bytes - self._block_bytes
        if not 0 < header <= block_file.MAX_HEADER_BYTES or header % block_file.ALIGNMENT:
            self._skip("size")
            return False
        if key in self._found:  # a chain has one root: one of the two names lies
            self._skip("name")
            return False
        root_tag = self._root_tags.setdefault(root_tag, root_tag)
        self._found[key] = FoundBlock(key, root_tag, parent_tag, file.physical_bytes, file.mtime)
        return True

    def _skip(self, reason: str) -> None:
        self._skipped[reason] = self._skipped.get(reason, 0) + 1

    def survey(
        self,
        request: SurveyRequest,
        *,
        adopts: Callable[[FoundBlock], bool] | None,
        free_bytes: int,
        seconds: float,
    ) -> Survey:
        """The whole of it; of what was found, only what the caller `adopts` (None: all)."""
        found = sorted(self._found.values(), key=attrgetter("mtime"))
        if adopts is not None:
            self._other_bytes += sum(block.num_bytes for block in found if not adopts(block))
            found = [block for block in found if adopts(block)]
        self._strangers.sort(key=lambda stranger: stranger.mtime)
        return Survey(
            request.epoch,
            request.num_drops,
            found,
            [entry for key, entry in request.known.items() if key not in self._seen],
            self._strangers[:_MAX_STRANGERS],
            self._other_bytes,
            self._skipped,
            free_bytes,
            seconds,
        )
