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
import hashlib
import itertools
import logging
import os
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

logger = logging.getLogger(__name__)

SET_ASIDE_SUFFIX = ".bad"
_COMPANIONS = ("-wal", "-shm")  # SQLite's own, beside the file

_RECORD_OVERHEAD = 128  # bytes charged for a record beyond its own
_FORMAT_VERSION = 1
_PAGE_BYTES = 4096
_WAL_PAGES = 64  # a checkpoint is due after so many
_BATCH_BYTES = 256 << 10  # of one transaction, so that the WAL stays near its mark
_MAX_BATCH = 512
_MAX_PENDING = 4096  # records on their way; a dead medium must not fill the memory
_RETRY_SECONDS = 1.0
_BUSY_SECONDS = 5.0  # for another process's transaction
_FLUSH_SECONDS = 30.0
_CLOSE_SECONDS = 5.0
_CORRUPT = (11, 26)  # SQLITE_CORRUPT, SQLITE_NOTADB
_FULL = 13

_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    space BLOB NOT NULL, name TEXT NOT NULL, key BLOB NOT NULL,
    value BLOB NOT NULL, checksum BLOB NOT NULL, written INTEGER NOT NULL,
    PRIMARY KEY (space, name, key)
);
CREATE INDEX IF NOT EXISTS by_age ON records (written);
"""


class RecordKey(NamedTuple):
    """Names a record."""

    table: str
    space: bytes
    key: bytes


@dataclass(slots=True)
class SideStats:
    """Records and bytes held, records on their way to the file, and what went wrong so far."""

    records: int = 0
    bytes: int = 0
    pending: int = 0
    failures: int = 0  # errors of the medium, and records found damaged


@dataclass(slots=True, eq=False)
class _Change:
    """One change of the file. `record` None: all of `space`; both None: everything."""

    number: int
    record: RecordKey | None = None
    space: bytes | None = None
    value: bytes | None = None  # None: delete


@dataclass(slots=True, eq=False)
class _Ticket:
    """Somebody waits until every change up to `number` is in the file, durably."""

    number: int
    done: Callable[[bool], None]


def physical_bytes(max_bytes: int) -> int:
    """What the files of a store of `max_bytes` may occupy: twice the records for half-filled
    pages, the write-ahead log, and SQLite's shared memory."""
    return 2 * max_bytes + (1 << 20)


class SideStore:
    """See the module. `SideStore.open` makes one; without a path it is memory alone."""

    def __init__(self, path: Path | None, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._condition = threading.Condition()
        self._records: OrderedDict[RecordKey, bytes] = OrderedDict()  # least recently used first
        self._keys: dict[tuple[str, bytes], dict[bytes, None]] = {}
        self._num_bytes = 0
        self._listeners: dict[str, Callable[[bytes, bytes], None]] = {}
        self._pending: OrderedDict[object, _Change] = OrderedDict()
        self._tickets: list[_Ticket] = []
        self._num_changes = 0
        self._failures = 0
        self._said_so = False
        self._closing = False
        self._thread: threading.Thread | None = None

    @classmethod
    def open(cls, path: Path | None, *, max_bytes: int) -> SideStore:
        """Load the records of `path`, newest first as far as they fit. Blocking, for startup.

        Never raises for what the medium does: the store is then empty, and tries again to write.
        """
        store = cls(path, max_bytes)
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
            value = self._records.get(record)
            if value is not None:
                self._records.move_to_end(record)
            return value

    def put(self, table: str, space: bytes, key: bytes, value: bytes) -> None:
        """Store or replace. One that is larger than the whole store is not kept."""
        record = RecordKey(table, space, bytes(key))
        with self._condition:
            self._remove(record)
            if _cost(record, value) > self._max_bytes:
                self._change(_Change(0, record))
                return
            self._insert(record, value)
            self._change(_Change(0, record, value=value))
            while self._num_bytes > self._max_bytes:
                oldest = next(iter(self._records))
                self._remove(oldest)
                self._change(_Change(0, oldest))
                if listener := self._listeners.get(oldest.table):
                    listener(oldest.space, oldest.key)

    def delete(self, table: str, space: bytes, key: bytes) -> None:
        """Remove one record; nothing if there is none."""
        record = RecordKey(table, space, bytes(key))
        with self._condition:
            if self._remove(record):
                self._change(_Change(0, record))

    def items(self, table: str, space: bytes) -> list[tuple[bytes, bytes]]:
        """Keys and values of one table of one space, the first written first."""
        with self._condition:
            keys = self._keys.get((table, space), {})
            return [(key, self._records[RecordKey(table, space, key)]) for key in keys]

    def spaces(self, table: str) -> list[bytes]:
        """The spaces that have records in `table`."""
        with self._condition:
            return [space for name, space in self._keys if name == table]

    def on_evicted(self, table: str, listener: Callable[[bytes, bytes], None]) -> None:
        """Call `listener(space, key)` for each record of `table` that makes way for another, from
        inside `put`; it must not call the store."""
        with self._condition:
            self._listeners[table] = listener

    def delete_space(self, space: bytes) -> int:
        """Forget a tenant: records removed. Durable once a `flush` after it has returned True."""
        with self._condition:
            gone = [record for record in self._records if record.space == space]
            for record in gone:
                self._remove(record)
            for name in [name for name, change in self._pending.items() if _is_of(change, space)]:
                self._supersede(name, self._num_changes + 1)
            self._change(_Change(0, space=space))
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
            self._change(_Change(0))
            return num_records

    def stats(self) -> SideStats:
        with self._condition:
            return SideStats(
                len(self._records), self._num_bytes, len(self._pending), self._failures
            )

    def check(self) -> None:
        """AssertionError if the accounts do not add up."""
        with self._condition:
            costs = sum(_cost(record, value) for record, value in self._records.items())
            assert self._num_bytes == costs, "bytes do not add up"
            keys = {RecordKey(t, s, k) for (t, s), keys in self._keys.items() for k in keys}
            assert keys == self._records.keys(), "the keys by space are not those of the records"

    def _insert(self, record: RecordKey, value: bytes) -> None:
        self._records[record] = value
        self._keys.setdefault((record.table, record.space), {})[record.key] = None
        self._num_bytes += _cost(record, value)

    def _remove(self, record: RecordKey) -> bool:
        value = self._records.pop(record, None)
        if value is None:
            return False
        self._num_bytes -= _cost(record, value)
        keys = self._keys[record.table, record.space]
        del keys[record.key]
        if not keys:
            del self._keys[record.table, record.space]
        return True

    def _change(self, change: _Change) -> None:
        if self._path is None:
            return
        self._num_changes += 1
        change.number = self._num_changes
        name = change.record or change.space or ()
        self._supersede(name, change.number)
        self._pending[name] = change
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
        """Wait until everything so far is in the file and survives a power cut; whether it does.

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
            with _Connection(path, self._max_bytes) as connection, self._condition:
                rows = connection.newest_first()
                for record, value in reversed(self._that_fit(rows)):
                    self._insert(record, value)
        except (OSError, sqlite3.Error) as error:
            self._note(error)
            if _is_corrupt(error):
                _set_aside(path)

    def _that_fit(
        self, rows: list[tuple[RecordKey, bytes, bytes]]
    ) -> list[tuple[RecordKey, bytes]]:
        fitting, num_bytes = [], 0
        for record, value, checksum in rows:
            if checksum != _checksum(record, value):
                self._failures += 1
                self._change(_Change(0, record))
                continue
            num_bytes += _cost(record, value)
            if num_bytes > self._max_bytes:
                self._change(_Change(0, record))
            else:
                fitting.append((record, value))
        return fitting

    def _write_behind(self, path: Path) -> None:
        connection: _Connection | None = None
        while True:
            with self._condition:
                while not self._pending and not self._tickets and not self._closing:
                    self._condition.wait()
                if self._closing and not self._pending:
                    break
                batch = self._next_batch()
            try:
                if connection is None:
                    connection = _Connection(path, self._max_bytes)
                connection.apply(batch)
                self._applied(batch)
                self._serve_tickets(connection)
            except (OSError, sqlite3.Error) as error:
                if connection is not None:
                    connection.close()
                    connection = None
                if not self._recover(path, error):
                    break
        if connection is not None:
            connection.close()
        self._give_up_tickets()

    def _next_batch(self) -> list[_Change]:
        batch, num_bytes = [], 0
        for change in itertools.islice(self._pending.values(), _MAX_BATCH):
            batch.append(change)
            num_bytes += len(change.value or b"")
            if num_bytes > _BATCH_BYTES:
                break
        return batch

    def _applied(self, batch: list[_Change]) -> None:
        with self._condition:
            for change in batch:
                name = change.record or change.space or ()
                if self._pending.get(name) is change:  # else a newer one took its place
                    del self._pending[name]

    def _serve_tickets(self, connection: _Connection) -> None:
        with self._condition:
            first = next(iter(self._pending.values()), None)
            served = [t for t in self._tickets if first is None or t.number < first.number]
        if not served:
            return
        connection.checkpoint()
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
            if _is_corrupt(error):
                _set_aside(path)
                for record, value in self._records.items():
                    self._change(_Change(0, record, value=value))
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


class _Connection:
    """The file, open. Any method raises OSError or sqlite3.Error."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        # SQLite would make the file readable for others and follow a link.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(path, flags, 0o600))
        self._path = path
        self._database = sqlite3.connect(
            f"file:{quote(str(path))}?mode=rw",
            uri=True,
            timeout=_BUSY_SECONDS,
            isolation_level=None,
        )
        try:
            self._prepare(max_bytes)
        except BaseException:
            self._database.close()
            raise

    def _prepare(self, max_bytes: int) -> None:
        execute = self._database.execute
        execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = NORMAL")  # a kill loses nothing; `checkpoint` syncs
        execute("PRAGMA secure_delete = ON")  # what is forgotten is not to be read from the file
        execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
        execute(f"PRAGMA journal_size_limit = {_WAL_PAGES * _PAGE_BYTES}")
        execute(f"PRAGMA max_page_count = {16 + 2 * max_bytes // _PAGE_BYTES}")
        (version,) = execute("PRAGMA user_version").fetchone()
        if version not in (0, _FORMAT_VERSION):
            raise _ForeignFormatError(f"format {version}, not {_FORMAT_VERSION}")
        self._database.executescript(_SCHEMA)
        execute(f"PRAGMA user_version = {_FORMAT_VERSION}")

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def newest_first(self) -> list[tuple[RecordKey, bytes, bytes]]:
        return _newest_first(self._database)

    def apply(self, changes: list[_Change]) -> None:
        """All or none, in order."""
        if not changes:
            return
        for is_last in (False, False, False, True):
            try:
                return self._apply(changes)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != _FULL or is_last:
                    raise
            # Other processes fill the file too: the oldest records, whoever wrote them, give way.
            self._database.execute(
                "DELETE FROM records WHERE rowid IN (SELECT rowid FROM records ORDER BY written"
                " LIMIT 1 + (SELECT count(*) / 2 FROM records))"
            )

    def _apply(self, changes: list[_Change]) -> None:
        execute = self._database.execute
        execute("BEGIN IMMEDIATE")
        try:
            for change in changes:
                if change.record is None and change.space is None:
                    execute("DELETE FROM records")
                elif change.record is None:
                    execute("DELETE FROM records WHERE space = ?", (change.space,))
                elif change.value is None:
                    table, space, key = change.record
                    execute(
                        "DELETE FROM records WHERE space = ? AND name = ? AND key = ?",
                        (space, table, key),
                    )
                else:
                    table, space, key = change.record
                    checksum = _checksum(change.record, change.value)
                    execute(
                        "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?)",
                        (space, table, key, change.value, checksum, time.time_ns()),
                    )
            execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                execute("ROLLBACK")
            raise

    def checkpoint(self) -> None:
        """Make everything applied so far survive a power cut."""
        # Another process that reads just now keeps part of it in the log: hence the log as well.
        self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        for path in (f"{self._path}-wal", str(self._path.parent)):
            with suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self._database.close()


class _ForeignFormatError(sqlite3.DatabaseError):
    """The file is no side store of this version, or damaged."""


def problem(path: Path) -> str | None:
    """What is wrong with a side store's file, which is only read; None if nothing is, "" if it is
    gone. For `overwinter store`."""
    if not path.exists():
        return ""
    try:
        database = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)
        try:
            rows = _newest_first(database)
        finally:
            database.close()
    except sqlite3.Error as error:
        return str(error)
    num_bad = sum(checksum != _checksum(record, value) for record, value, checksum in rows)
    return f"{num_bad} of {len(rows)} records damaged" if num_bad else None


def _newest_first(database: sqlite3.Connection) -> list[tuple[RecordKey, bytes, bytes]]:
    """Every record with its checksum. Raises `_ForeignFormatError` for a damaged file."""
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version != _FORMAT_VERSION:
        raise _ForeignFormatError(f"format {version}, not {_FORMAT_VERSION}")
    (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise _ForeignFormatError(f"damaged: {verdict}")
    rows = database.execute(
        "SELECT name, space, key, value, checksum FROM records ORDER BY written DESC"
    )
    return [(RecordKey(*row[:3]), row[3], row[4]) for row in rows]


def _cost(record: RecordKey, value: bytes) -> int:
    return len(record.table) + len(record.space) + len(record.key) + len(value) + _RECORD_OVERHEAD


def _checksum(record: RecordKey, value: bytes) -> bytes:
    hasher = hashlib.blake2b(digest_size=8)
    for part in (record.table.encode(), record.space, record.key, value):
        hasher.update(len(part).to_bytes(8, "little") + part)
    return hasher.digest()


def _is_of(change: _Change, space: bytes) -> bool:
    return change.space == space or (change.record is not None and change.record.space == space)


def _is_corrupt(error: Exception) -> bool:
    if isinstance(error, _ForeignFormatError):
        return True
    return isinstance(error, sqlite3.Error) and (
        getattr(error, "sqlite_errorcode", 0) & 0xFF in _CORRUPT
    )


def _set_aside(path: Path) -> None:
    """Out of the way, to be looked at; with its log, which would be replayed into the next one."""
    with suppress(OSError):
        os.replace(path, f"{path}{SET_ASIDE_SUFFIX}")
    for companion in _COMPANIONS:
        with suppress(OSError):
            os.unlink(f"{path}{companion}")
