"""The ledger: how many bytes a store may occupy at this instant, agreed on by all who write to it.

One page, `.ledger` in the store's directory, read and changed only under its lock. Bytes are
charged before they come into being and released after they are gone, so whoever is killed between
leaves the sum too high, never too low:

    occupied >= physical bytes, at every instant

What was left too high, and what others than us added or removed, a survey puts right. It walks the
directory while everybody goes on writing, so what it adds up only bounds the truth:

    scanned - released meanwhile  <=  occupied  <=  scanned + charged meanwhile

Never synced: after a power cut nobody is writing, and the next one to open the store surveys it.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import xxhash

from offload.locked_file import open_locked

LEDGER_NAME = ".ledger"

_MAGIC = b"OWLEDGR\n"
_VERSION = 1
_FIXED = struct.Struct("<8sIIqqq")  # magic, version, 0, occupied, charged, released
_PAGE_BYTES = 4096  # all written at once, so that later changes need no room


class Mark(NamedTuple):
    """Where the running sums stood when a survey began to look."""

    charged: int
    released: int


class Account:
    """The ledger while its lock is held. Bytes."""

    def __init__(self, fd: int, occupied: int, charged: int = 0, released: int = 0) -> None:
        self._fd = fd
        self.occupied = occupied
        self._charged = charged  # ever, as is `_released`
        self._released = released
        self._written: tuple[int, int, int] | None = None

    def charge(self, num_bytes: int) -> None:
        """Before they are there; on record when this returns."""
        self._add(num_bytes, 0)
        self.write()

    def release(self, num_bytes: int) -> None:
        """After they are gone; on record with the next charge or the end of the lock."""
        self._add(0, num_bytes)

    def exchange(self, charged: int, came: int) -> None:
        """A charge made earlier gives way to what really came of it."""
        self._add(came, charged)

    def _add(self, charged: int, released: int) -> None:
        self._charged += charged
        self._released += released
        self.occupied = max(0, self.occupied + charged - released)

    def moved(self) -> None:
        """So much changes place that no look now under way can tell what it has seen."""
        self._charged += self.occupied
        self._released += self.occupied

    def mark(self) -> Mark:
        return Mark(self._charged, self._released)

    def reconcile(self, since: Mark, scanned: int) -> None:
        """Correct the sum by what was found in a walk begun at `since`."""
        least = scanned - (self._released - since.released)
        most = scanned + (self._charged - since.charged)
        self.occupied = min(max(self.occupied, least), most)

    def recorded(self) -> None:
        """It is what was read."""
        self._written = (self.occupied, self._charged, self._released)

    def write(self) -> None:
        """Put it on record, if anything has changed."""
        if self._written == (self.occupied, self._charged, self._released):
            return
        page = _FIXED.pack(_MAGIC, _VERSION, 0, self.occupied, self._charged, self._released)
        os.pwrite(self._fd, page + xxhash.xxh3_64_digest(page), 0)
        self.recorded()


class Ledger:
    """The ledger of the store behind `dir_fd`, which may come to stand for a new directory.

    `measure` tells the physical bytes of the store while nobody else can change it: it is asked
    where there is no ledger yet, or none that can be read.
    """

    def __init__(self, dir_fd: int, measure: Callable[[], int]) -> None:
        self._dir_fd = dir_fd
        self._measure = measure

    @contextmanager
    def locked(self) -> Iterator[Account]:
        """Hold the ledger; what was done to it is recorded at the end, also after an error.

        Raises OSError, FileNotFoundError if the store is gone.
        """
        fd = self._lock()
        try:
            account = self._read(fd)
            try:
                yield account
            finally:
                account.write()
        finally:
            os.close(fd)

    def _lock(self) -> int:
        """A descriptor of the ledger, locked until it is closed. Opened each time, so that the
        file system can be made read-only while nobody writes."""
        return open_locked(LEDGER_NAME, self._dir_fd, fcntl.LOCK_EX)

    def _read(self, fd: int) -> Account:
        raw = os.pread(fd, _FIXED.size + 8, 0)
        page, checksum = raw[: _FIXED.size], raw[_FIXED.size :]
        if len(raw) == _FIXED.size + 8 and checksum == xxhash.xxh3_64_digest(page):
            magic, version, _, occupied, charged, released = _FIXED.unpack(page)
            if (magic, version) == (_MAGIC, _VERSION):
                account = Account(fd, occupied, charged, released)
                account.recorded()
                return account
        os.pwrite(fd, bytes(_PAGE_BYTES), 0)
        return Account(fd, self._measure())
