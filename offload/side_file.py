"""The file of a side store: records in SQLite, written in batches by one thread.

Readable by its owner only, not reached through a link. What is deleted is overwritten, each record
has a checksum, and each process on the file keeps within the bytes that were promised for it. Every
method blocks, and raises OSError or sqlite3.Error.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

SET_ASIDE_SUFFIX = ".bad"
_COMPANIONS = ("-wal", "-shm")  # SQLite's own, beside the file

_FORMAT_VERSION = 1
_PAGE_BYTES = 4096
_WAL_PAGES = 64  # a checkpoint is due after so many
_BUSY_SECONDS = 5.0  # for another process's transaction
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


class Row(NamedTuple):
    """A record as the file has it; `used` in nanoseconds since the epoch."""

    record: RecordKey
    value: bytes
    is_whole: bool
    used: int


@dataclass(slots=True, eq=False)
class Change:
    """One change of the file: of a `record`, or the deletion of all of a `space`, of a `table`, of
    what was last used `before` (nanoseconds since the epoch); with none of these, of everything."""

    record: RecordKey | None = None
    value: bytes | None = None  # None: delete it
    used: int = 0
    space: bytes | None = None
    table: str | None = None
    before: int | None = None
    number: int = 0

    @property
    def name(self) -> object:
        """Equal for changes of which a later one makes an earlier one needless."""
        return (self.record, self.space, self.table, self.before is None)

    def concerns(self, space: bytes) -> bool:
        """Whether it is one of that space alone."""
        return self.space == space or (self.record is not None and self.record.space == space)


class SideFile:
    """The file, open. The bytes of its records are bounded by `physical_bytes(max_bytes)`."""

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

    def __enter__(self) -> SideFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def latest_first(self) -> list[Row]:
        """Every record. Raises sqlite3.DatabaseError for a damaged file, too."""
        return _latest_first(self._database)

    def apply(self, changes: Sequence[Change]) -> None:
        """All or none, in order."""
        if not changes:
            return
        for is_last in (False, False, False, True):
            try:
                num_deleted = self._apply(changes)
                break
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != _FULL or is_last:
                    raise
            # Other processes fill the file too: the oldest records, whoever wrote them, give way.
            self._database.execute(
                "DELETE FROM records WHERE rowid IN (SELECT rowid FROM records ORDER BY written"
                " LIMIT 1 + (SELECT count(*) / 2 FROM records))"
            )
        if num_deleted:
            self.checkpoint()  # the log still has what they were
        for change in changes:
            self._clean_set_aside(change)

    def _apply(self, changes: Sequence[Change]) -> int:
        """Records that were deleted not one by one."""
        num_deleted = 0
        self._database.execute("BEGIN IMMEDIATE")
        try:
            for change in changes:
                if change.record is None:
                    num_deleted += self._delete(change)
                else:
                    self._put(change.record, change.value, change.used)
            self._database.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")
            raise
        return num_deleted

    def _put(self, record: RecordKey, value: bytes | None, used: int) -> None:
        table, space, key = record
        if value is None:
            self._database.execute(
                "DELETE FROM records WHERE space = ? AND name = ? AND key = ?", (space, table, key)
            )
        else:
            self._database.execute(
                "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?)",
                (space, table, key, value, _checksum(record, value), used),
            )

    def _delete(self, change: Change) -> int:
        execute = self._database.execute
        if change.space is not None:
            cursor = execute("DELETE FROM records WHERE space = ?", (change.space,))
        elif change.table is not None:
            cursor = execute("DELETE FROM records WHERE name = ?", (change.table,))
        elif change.before is not None:
            cursor = execute("DELETE FROM records WHERE written < ?", (change.before,))
        else:
            cursor = execute("DELETE FROM records")
        return cursor.rowcount

    def _clean_set_aside(self, change: Change) -> None:
        """What was found damaged holds the same secrets, and nobody can pick from it."""
        if change.record is not None or change.table is not None:
            return
        path = f"{self._path}{SET_ASIDE_SUFFIX}"
        with suppress(FileNotFoundError):
            if change.before is None or os.lstat(path).st_mtime_ns < change.before:
                os.unlink(path)
                _sync(str(self._path.parent))

    def checkpoint(self) -> None:
        """Make everything applied so far survive a power cut."""
        # Another process that reads just now keeps part of it in the log: hence the log as well.
        self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        for path in (f"{self._path}-wal", str(self._path.parent)):
            with suppress(FileNotFoundError):
                _sync(path)

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self._database.close()


class _ForeignFormatError(sqlite3.DatabaseError):
    """The file is no side store of this version, or damaged."""


def physical_bytes(max_bytes: int) -> int:
    """What the files of a store of `max_bytes` may occupy: twice the records for half-filled
    pages, the write-ahead log, and SQLite's shared memory."""
    return 2 * max_bytes + (1 << 20)


def problem(path: Path) -> str | None:
    """What is wrong with a side store's file, which is only read; None if nothing is, "" if it is
    gone. For `overwinter store`."""
    if not path.exists():
        return ""
    try:
        database = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)
        try:
            rows = _latest_first(database)
        finally:
            database.close()
    except sqlite3.Error as error:
        return str(error)
    num_bad = sum(not row.is_whole for row in rows)
    return f"{num_bad} of {len(rows)} records damaged" if num_bad else None


def is_corrupt(error: Exception) -> bool:
    """Whether it says that the file is damaged or none of ours."""
    if isinstance(error, _ForeignFormatError):
        return True
    return isinstance(error, sqlite3.Error) and (
        getattr(error, "sqlite_errorcode", 0) & 0xFF in _CORRUPT
    )


def set_aside(path: Path) -> None:
    """Out of the way, to be looked at; with its log, which would be replayed into the next one."""
    with suppress(OSError):
        os.replace(path, f"{path}{SET_ASIDE_SUFFIX}")
    for companion in _COMPANIONS:
        with suppress(OSError):
            os.unlink(f"{path}{companion}")


def _latest_first(database: sqlite3.Connection) -> list[Row]:
    """See `SideFile.latest_first`."""
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version != _FORMAT_VERSION:
        raise _ForeignFormatError(f"format {version}, not {_FORMAT_VERSION}")
    (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise _ForeignFormatError(f"damaged: {verdict}")
    rows = database.execute(
        "SELECT name, space, key, value, checksum, written FROM records ORDER BY written DESC"
    )
    found = []
    for table, space, key, value, checksum, used in rows:
        record = RecordKey(table, space, key)
        found.append(Row(record, value, checksum == _checksum(record, value), used))
    return found


def _checksum(record: RecordKey, value: bytes) -> bytes:
    hasher = hashlib.blake2b(digest_size=8)
    for part in (record.table.encode(), record.space, record.key, value):
        hasher.update(len(part).to_bytes(8, "little") + part)
    return hasher.digest()


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
