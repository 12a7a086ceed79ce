"""Small records beside the blocks: what a restart should still know of them, and is no KV.

    open                       load what the file holds
    get, put, delete, items    memory alone, bounded: the least recently used record goes first
    delete_space, clear        the same at once, and in the file once `flush` has returned True
    flush, close               everything so far is in the file, for good

A record is `(table, space, key) -> value`; a space is a tenant, and nothing crosses it. Memory is
the truth. A daemon thread writes behind it into SQLite (WAL), so that no caller ever waits for the
medium and a kill loses at most what was still on its way. Best effort throughout: an error is
counted, logged once and tried again; a damaged file is set aside; a damaged record is absent.
Several processes may open one file: each bounds and serves what it loaded and what it wrote.
Every method may be called from any thread.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offload.side_file import Change, RecordKey, Row, SideFile, is_corrupt, set_aside

logger = logging.getLogger(__name__)

_RECORD_OVERHEAD = 128  # bytes charged for a record beyond its own
_BATCH_BYTES = 256 << 10  # of one transaction, so that the WAL stays near its mark
_MAX_BATCH = 512
_MAX_PENDING = 4096  # records on their way; a dead medium must not fill the memory
_RETRY_SECONDS = 1.0
_FLUSH_SECONDS = 30.0
_CLOSE_SECONDS = 5.0
_MAX_SWEEP_SECONDS = 60.0
_MAX_EXPIRED = 64  # at once, where somebody waits
_MAX_SWEPT = 1024
# A use is written once the one on record is this much of the TTL old: a restart may take a record
# for less recently used than it was, never for more.
_RECORDED_PART = 8


@dataclass(slots=True)
class SideStats:
    """Records and bytes held, records on their way to the file, and what went wrong so far."""

    records: int = 0
    bytes: int = 0
    pending: int = 0
    failures: int = 0  # errors of the medium, and records found damaged


@dataclass(slots=True, eq=False)
class _Held:
    """A record in memory; nanoseconds since the epoch."""

    value: bytes
    used: int
    recorded: int  # the last use that the file knows or will


@dataclass(slots=True, eq=False)
class _Ticket:
    """Somebody waits until every change up to `number` is in the file, durably."""

    number: int
    done: Callable[[bool], None]


class SideStore:
    """See the module. `SideStore.open` makes one; without a path it is memory alone."""

    def __init__(
        self,
        path: Path | None,
        max_bytes: int,
        ttl_seconds: float = 0.0,
        volatile: Collection[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._ttl_nanoseconds = int(ttl_seconds * 1e9)
        self._volatile = frozenset(volatile)
        self._clock = clock
        # In seconds; None: never.
        part = max(1.0, ttl_seconds / _RECORDED_PART)
        self._sweep_seconds = min(_MAX_SWEEP_SECONDS, part) if ttl_seconds else None
        self._condition = threading.Condition()
        self._records: OrderedDict[RecordKey, _Held] = OrderedDict()  # least recently used first
        self._keys: dict[tuple[str, bytes], dict[bytes, None]] = {}
        self._num_bytes = 0
        self._listeners: dict[str, Callable[[bytes, bytes], None]] = {}
        self._pending: OrderedDict[object, Change] = OrderedDict()
        self._tickets: list[_Ticket] = []
        self._num_changes = 0
        self._failures = 0
        self._said_so = False
        self._closing = False
        self._thread: threading.Thread | None = None

    @classmethod
    def open(
        cls,
        path: Path | None,
        *,
        max_bytes: int,
        ttl_seconds: float = 0.0,
        volatile: Collection[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> SideStore:
        """Load the records of `path`, newest first as far as they fit. Blocking, for startup.

        With `ttl_seconds`, a record unused for longer is none, and is deleted from memory and file.
        The `volatile` tables are never written, and what the file has of them is deleted.
        Never raises for what the medium does: the store is then empty, and tries again to write.
        """
        store = cls(path, max_bytes, ttl_seconds, volatile, clock)
        if path is not None:
            store._load(path)
            store._thread = threading.Thread(
                target=store._write_behind, args=(path,), name="side-store", daemon=True
            )
            store._thread.start()
        return store

    # --- memory -----------------------------------------------------------------------------

    def get(self, table: str, space: bytes, key: bytes) -> bytes | None:
        """The record's value, now the most recently used; None if there is none."""
        record = RecordKey(table, space, key)
        with self._condition:
            now = self._now()
            self._expire(now, _MAX_EXPIRED)
            held = self._records.get(record)
            if held is None:
                return None
            if self._is_expired(held, now):
                self._make_way(record)
                return None
            held.used = now
            self._records.move_to_end(record)
            if 0 < self._ttl_nanoseconds < _RECORDED_PART * (now - held.recorded):
                held.recorded = now
                self._write(record, held)
            return held.value

    def put(self, table: str, space: bytes, key: bytes, value: bytes) -> None:
        """Store or replace. One that is larger than the whole store is not kept."""
        record = RecordKey(table, space, bytes(key))
        with self._condition:
            now = self._now()
            self._expire(now, _MAX_EXPIRED)
            self._remove(record)
            if _cost(record, value) > self._max_bytes:
                self._erase(record)
                return
            held = _Held(value, now, now)
            self._insert(record, held)
            self._write(record, held)
            while self._num_bytes > self._max_bytes:
                oldest = next(iter(self._records))
                self._make_way(oldest)
                self._erase(oldest)

    def delete(self, table: str, space: bytes, key: bytes) -> None:
        """Remove one record; nothing if there is none."""
        record = RecordKey(table, space, bytes(key))
        with self._condition:
            if self._remove(record):
                self._erase(record)

    def items(self, table: str, space: bytes) -> list[tuple[bytes, bytes]]:
        """Keys and values of one table of one space, the first written first."""
        with self._condition:
            keys, now = self._keys.get((table, space), {}), self._now()
            held = [(key, self._records[RecordKey(table, space, key)]) for key in keys]
            return [(key, one.value) for key, one in held if not self._is_expired(one, now)]

    def spaces(self, table: str) -> list[bytes]:
        """The spaces that have records in `table`."""
        with self._condition:
            return [space for name, space in self._keys if name == table]

    def on_evicted(self, table: str, listener: Callable[[bytes, bytes], None]) -> None:
        """Call `listener(space, key)` for each record of `table` that makes way for another or
        expires, in any thread and from inside the store, which it must not call."""
        with self._condition:
            self._listeners[table] = listener

    def delete_space(self, space: bytes) -> int:
        """Forget a tenant: records removed. Durable once a `flush` after it has returned True."""
        with self._condition:
            gone = [record for record in self._records if record.space == space]
            for record in gone:
                self._remove(record)
            for name in [name for name, change in self._pending.items() if change.concerns(space)]:
                self._supersede(name, self._num_changes + 1)
            self._change(Change(space=space))
            return len(gone)

    def clear(self) -> int:
        """Forget everything: records removed. Durable once a `flush` after it has returned True."""
        with self._condition:
            num_records = len(self._records)
            self._records.clear()
            self._keys.clear()
            self._num_bytes = 0
            for name in list(self._pending):
                self._supersede(name, self._num_changes + 1)
            self._change(Change())
            return num_records

    def stats(self) -> SideStats:
        with self._condition:
            self._expire(self._now(), _MAX_EXPIRED)
            return SideStats(
                len(self._records), self._num_bytes, len(self._pending), self._failures
            )

    def check(self) -> None:
        """AssertionError if the accounts do not add up."""
        with self._condition:
            costs = sum(_cost(record, held.value) for record, held in self._records.items())
            assert self._num_bytes == costs, "bytes do not add up"
            keys = {RecordKey(t, s, k) for (t, s), keys in self._keys.items() for k in keys}
            assert keys == self._records.keys(), "the keys by space are not those of the records"

    def _now(self) -> int:
        return int(self._clock() * 1e9)

    def _is_expired(self, held: _Held, now: int) -> bool:
        return 0 < self._ttl_nanoseconds < now - held.used

    def _expire(self, now: int, most: int) -> bool:
        """Drop up to `most` of what has expired, the least recently used first; whether any had.
        In the file all of it goes."""
        if not self._ttl_nanoseconds:
            return False
        any_gone = False
        for _ in range(most):
            oldest = next(iter(self._records), None)
            if oldest is None or not self._is_expired(self._records[oldest], now):
                break
            self._make_way(oldest)
            any_gone = True
        if any_gone:
            self._change(Change(before=now - self._ttl_nanoseconds))
        return any_gone

    def _sweep(self) -> None:
        """Drop what has expired. In the file there may be records that are not in memory."""
        now = self._now()
        if self._ttl_nanoseconds and not self._expire(now, _MAX_SWEPT):
            self._change(Change(before=now - self._ttl_nanoseconds))

    def _insert(self, record: RecordKey, held: _Held) -> None:
        self._records[record] = held
        self._keys.setdefault((record.table, record.space), {})[record.key] = None
        self._num_bytes += _cost(record, held.value)

    def _make_way(self, record: RecordKey) -> None:
        self._remove(record)
        if listener := self._listeners.get(record.table):
            listener(record.space, record.key)

    def _remove(self, record: RecordKey) -> bool:
        held = self._records.pop(record, None)
        if held is None:
            return False
        self._num_bytes -= _cost(record, held.value)
        keys = self._keys[record.table, record.space]
        del keys[record.key]
        if not keys:
            del self._keys[record.table, record.space]
        return True

    def _write(self, record: RecordKey, held: _Held) -> None:
        if record.table not in self._volatile:
            self._change(Change(record, held.value, held.used))

    def _erase(self, record: RecordKey) -> None:
        if record.table not in self._volatile:
            self._change(Change(record))

    def _change(self, change: Change) -> None:
        if self._path is None:
            return
        self._num_changes += 1
        change.number = self._num_changes
        self._supersede(change.name, change.number)
        self._pending[change.name] = change
        if len(self._pending) > _MAX_PENDING:  # forgetting a tenant is never given up
            oldest = next(n for n, c in self._pending.items() if c.record is not None)
            del self._pending[oldest]
            self._failures += 1
        self._condition.notify_all()

    def _supersede(self, name: object, number: int) -> None:
        """A newer change takes the place of a pending one: whoever waits for that waits on."""
        old = self._pending.pop(name, None)
        for ticket in self._tickets:
            if old is not None and ticket.number >= old.number:
                ticket.number = number

    # --- the file ---------------------------------------------------------------------------

    async def flush(self) -> bool:
        """Wait until everything so far is in the file and survives a power cut, and what has
        expired is not in it any more; whether that is so.

        Without a file there is nothing to wait for. Cancelled, the writing goes on.
        """
        if self._thread is None:
            return True
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()

        def settle(durable: bool) -> None:
            if not future.done():
                future.set_result(durable)

        def done(durable: bool) -> None:
            with suppress(RuntimeError):  # the loop has closed: a hung medium came back late
                loop.call_soon_threadsafe(settle, durable)

        with self._condition:
            if self._closing:
                return False
            self._sweep()
            self._tickets.append(_Ticket(self._num_changes, done))
            self._condition.notify_all()
        try:
            async with asyncio.timeout(_FLUSH_SECONDS):
                return await future
        except TimeoutError:
            return False

    def close(self) -> None:
        """Write what is pending, for a few seconds, and stop. Blocking; safe to call twice."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _load(self, path: Path) -> None:
        try:
            with SideFile(path, self._max_bytes) as file, self._condition:
                for row in reversed(self._that_fit(file.latest_first())):
                    used = min(row.used, self._now())
                    self._insert(row.record, _Held(row.value, used, used))
        except (OSError, sqlite3.Error) as error:
            self._note(error)
            if is_corrupt(error):
                set_aside(path)
        with self._condition:
            for table in sorted(self._volatile):
                self._change(Change(table=table))
            self._sweep()

    def _that_fit(self, rows: list[Row]) -> list[Row]:
        fitting, num_bytes = [], 0
        for row in rows:
            if row.record.table in self._volatile:
                continue
            if not row.is_whole:
                self._failures += 1
                self._change(Change(row.record))
                continue
            num_bytes += _cost(row.record, row.value)
            if num_bytes > self._max_bytes:
                self._change(Change(row.record))
            else:
                fitting.append(row)
        return fitting

    def _write_behind(self, path: Path) -> None:
        file: SideFile | None = None
        while True:
            with self._condition:
                while not self._pending and not self._tickets and not self._closing:
                    if not self._condition.wait(self._sweep_seconds):
                        self._sweep()
                if self._closing and not self._pending:
                    break
                batch = self._next_batch()
            try:
                if file is None:
                    file = SideFile(path, self._max_bytes)
                file.apply(batch)
                self._applied(batch)
                self._serve_tickets(file)
            except (OSError, sqlite3.Error) as error:
                if file is not None:
                    file.close()
                    file = None
                if not self._recover(path, error):
                    break
        if file is not None:
            file.close()
        self._give_up_tickets()

    def _next_batch(self) -> list[Change]:
        batch, num_bytes = [], 0
        for change in itertools.islice(self._pending.values(), _MAX_BATCH):
            batch.append(change)
            num_bytes += len(change.value or b"")
            if num_bytes > _BATCH_BYTES:
                break
        return batch

    def _applied(self, batch: list[Change]) -> None:
        with self._condition:
            for change in batch:
                if self._pending.get(change.name) is change:  # else a newer one took its place
                    del self._pending[change.name]

    def _serve_tickets(self, file: SideFile) -> None:
        with self._condition:
            first = next(iter(self._pending.values()), None)
            served = [t for t in self._tickets if first is None or t.number < first.number]
        if not served:
            return
        file.checkpoint()
        with self._condition:
            self._tickets = [ticket for ticket in self._tickets if ticket not in served]
        for ticket in served:
            ticket.done(True)

    def _recover(self, path: Path, error: Exception) -> bool:
        """After an error: say so, and whether to go on."""
        self._note(error)
        self._give_up_tickets()
        with self._condition:
            if self._closing:
                return False
            if is_corrupt(error):
                set_aside(path)
                for record, held in self._records.items():
                    self._write(record, held)
                return True
            self._condition.wait_for(lambda: self._closing, _RETRY_SECONDS)
            return True

    def _give_up_tickets(self) -> None:
        with self._condition:
            tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            ticket.done(False)

    def _note(self, error: Exception) -> None:
        self._failures += 1
        if not self._said_so:
            self._said_so = True
            logger.warning("%s: %s; what it would keep ends with this process", self._path, error)


def _cost(record: RecordKey, value: bytes) -> int:
    return len(record.table) + len(record.space) + len(record.key) + len(value) + _RECORD_OVERHEAD
