"""Block files in a directory: the blocking half of the disk tier. Runs on I/O threads.

    store    evict -> temporary file, locked -> write -> fdatasync -> rename into place -> close
    fetch    open -> read into place -> verify
    remove   unlink -> drop the directory if that emptied it
    survey   what is really there; dead writers' leftovers are reclaimed on the way
    wipe     rename the fingerprint's directory away -> make a new one -> fsync

Every operation names the epoch in which it was asked for. `wipe` starts a new one, and an operation
of an older epoch finds nothing and publishes nothing: a save that a reset overtook either is
refused, or ends in the directory that was renamed away.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from offload import block_file
from offload.block_file import BlockCorruptError, BlockName
from offload.store_scan import (
    TEMPORARY_PREFIX,
    TRASH_PREFIX,
    Kind,
    StoreFile,
    block_name,
    is_outdated_name,
    open_directory,
    parse_block_name,
    reclaim_temporary,
    remove_tree,
    scan,
)
from offload.tier import (
    BlockKey,
    BlockMeta,
    Entry,
    FoundBlock,
    StrangerFile,
    TierOpenError,
    WriteResult,
)

_MAX_STRANGERS = 8192  # eviction candidates a survey names; more come with the next
_PUBLISH_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class SurveyRequest:
    """What the planner knows before a survey."""

    epoch: int
    known: Mapping[BlockKey, Entry]  # the entries are only handed back
    touched: Mapping[BlockName, float]  # seconds since the epoch, to be recorded as mtime


@dataclass(frozen=True, slots=True)
class Survey:
    """What lies in the directory beside the blocks already known; bytes are physical."""

    epoch: int
    found: list[FoundBlock]  # ours, not known; oldest first
    vanished: list[Entry]  # known, not there
    strangers: list[StrangerFile]  # may be evicted; oldest first
    other_bytes: int  # all that is neither known nor found, strangers and directories included
    skipped: dict[str, int]
    seconds: float


class BlockDirectory:
    """The block files of one fingerprint in a directory that may be shared."""

    def __init__(self, directory: Path, fingerprint: bytes, block_bytes: int) -> None:
        """Create and open; nothing is scanned yet. Raises TierOpenError."""
        self._path = directory
        self._fingerprint = fingerprint
        self._name = fingerprint.hex()
        self._block_bytes = block_bytes
        self._token = f"{os.getpid()}.{secrets.token_hex(4)}"
        self._lock = threading.Lock()  # epoch, descriptor and counter; never taken by the planner
        self._epoch = 0
        self._count = 0
        self._wipe_failed = False
        self._dirty: set[str] = set()
        try:
            self._dir_fd = self._open()
            self._probe()
        except OSError as error:
            raise TierOpenError(_open_message(directory, error)) from error
        self.unit_bytes = max(512, os.fstatvfs(self._dir_fd).f_bsize)  # what a file grows by

    def _open(self) -> int:
        try:
            # Not exist_ok: a fresh directory gets its mode at once, an old one keeps its own.
            os.makedirs(self._path.parent, exist_ok=True)
            os.mkdir(self._path, 0o700)
        except FileExistsError:
            pass
        dir_fd = open_directory(str(self._path))
        if not os.listdir(dir_fd) and os.fstat(dir_fd).st_uid == os.geteuid():
            os.fchmod(dir_fd, 0o700)
        with suppress(FileExistsError):
            os.mkdir(self._name, 0o700, dir_fd=dir_fd)
        return dir_fd

    def _probe(self) -> None:
        """Write and remove one byte. A full disk passes: what it holds can still be read, and
        saving resumes when there is room."""
        try:
            with self._root(0) as root:
                name, fd = self._create_temporary(root)
                try:
                    os.write(fd, b"\0")
                finally:
                    os.unlink(name, dir_fd=root)
                    os.close(fd)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def store(
        self,
        epoch: int,
        name: BlockName,
        meta: BlockMeta,
        payload: memoryview,
        evict: Sequence[BlockName],
        strangers: Sequence[StrangerFile],
    ) -> WriteResult:
        """Evict, then write and publish one block. Errors come in the result, with what was
        evicted before them. Nothing is written until all that should go is gone."""
        removed: set[BlockKey] = set()
        other_bytes = 0
        try:
            with self._root(epoch) as root:
                for victim in evict:
                    other_bytes += self._unlink(root, victim)
                    removed.add(victim.key)
                for stranger in strangers:
                    other_bytes += self._unlink_stranger(stranger)
                header = block_file.encode_header(self._fingerprint, name.key, meta, payload)
                num_bytes, grown = self._write_record(root, name, header, payload)
            return WriteResult(None, num_bytes, frozenset(removed), other_bytes + grown)
        except OSError as error:
            return WriteResult(error, 0, frozenset(removed), other_bytes)

    def _write_record(
        self, root: int, name: BlockName, header: bytes, payload: memoryview
    ) -> tuple[int, int]:
        """Bytes of the file and growth of its directory."""
        temporary, fd = self._create_temporary(root)
        try:
            _write_all(fd, header, payload)
            os.fdatasync(fd)
            num_bytes = os.fstat(fd).st_blocks * 512
            # The lock that marks the file as alive lasts until close, hence the close at the end.
            return num_bytes, self._publish(root, temporary, name)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=root)
            raise
        finally:
            os.close(fd)

    def _create_temporary(self, root: int) -> tuple[str, int]:
        while True:
            with self._lock:
                self._count += 1
                name = f"{TEMPORARY_PREFIX}{self._token}.{self._count}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(name, flags, 0o600, dir_fd=root)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_nlink:
                    return name, fd
            except BlockingIOError:
                pass  # a reclaimer saw the file before it was locked; it removes it
            except OSError:
                with suppress(OSError):
                    os.unlink(name, dir_fd=root)
                os.close(fd)
                raise
            os.close(fd)

    def _publish(self, root: int, temporary: str, block: BlockName) -> int:
        prefix, name = block_name(block)
        for attempt in range(_PUBLISH_ATTEMPTS):
            before = 0
            try:
                os.mkdir(prefix, 0o700, dir_fd=root)
            except FileExistsError:
                before = -1
            try:
                folder = open_directory(prefix, root)
            except FileNotFoundError:
                continue
            try:
                before = os.fstat(folder).st_blocks * 512 if before else 0
                os.rename(temporary, name, src_dir_fd=root, dst_dir_fd=folder)
                grown = os.fstat(folder).st_blocks * 512 - before
            except FileNotFoundError:  # an eviction emptied and dropped the directory just now
                if attempt == _PUBLISH_ATTEMPTS - 1:
                    raise
                continue
            finally:
                os.close(folder)
            with self._lock:
                self._dirty.add(prefix)
            return grown
        raise FileNotFoundError(errno.ENOENT, "the directory vanishes again and again", prefix)

    def fetch(self, block: BlockName, into: memoryview) -> BlockMeta:
        """Read and verify one block. Raises BlockCorruptError, FileNotFoundError, OSError.

        Of any epoch: what lies under a key is what the key says, whenever it was written.
        """
        with self._record(block) as fd:
            header = read_record(fd, into)
        block_file.verify(header, into, fingerprint=self._fingerprint, name=block)
        return header.meta

    def fetch_meta(self, block: BlockName) -> BlockMeta:
        """Read and verify the header of one block. Raises like `fetch`."""
        with self._record(block) as fd:
            size = block_file.declared_header_bytes(os.pread(fd, 16, 0))
            header = block_file.decode_header(os.pread(fd, size, 0))
        block_file.verify_header(header, fingerprint=self._fingerprint, name=block)
        return header.meta

    @contextmanager
    def _record(self, block: BlockName) -> Iterator[int]:
        """A descriptor for reading. Raises FileNotFoundError, OSError."""
        prefix, name = block_name(block)
        with self._root(None, create=False) as root:
            folder = open_directory(prefix, root)
            try:
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
                fd = os.open(name, flags, dir_fd=folder)
            finally:
                os.close(folder)
        try:
            yield fd
        finally:
            os.close(fd)

    def path_of(self, block: BlockName) -> Path:
        """Where a stored block lies, for a person to look at."""
        return self._path.joinpath(self._name, *block_name(block))

    def remove(self, epoch: int, block: BlockName) -> WriteResult:
        """Unlink one block; one already gone counts as removed."""
        try:
            with self._root(epoch) as root:
                other_bytes = self._unlink(root, block)
        except OSError as error:
            return WriteResult(error)
        return WriteResult(removed=frozenset((block.key,)), other_bytes=other_bytes)

    def _unlink(self, root: int, block: BlockName) -> int:
        """Change in directory bytes: negative if the block was the last in its directory."""
        prefix, name = block_name(block)
        return self._unlink_in(root, prefix, name)

    def _unlink_in(self, root: int, prefix: str, name: str) -> int:
        try:
            folder = open_directory(prefix, root)
        except FileNotFoundError:
            return 0
        try:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            folder_bytes = os.fstat(folder).st_blocks * 512
        finally:
            os.close(folder)
        # Empty directories would add up to a page for each of the 256 prefixes.
        try:
            os.rmdir(prefix, dir_fd=root)
        except OSError:
            return 0
        return -folder_bytes

    def _unlink_stranger(self, stranger: StrangerFile) -> int:
        """Change in bytes. EAGAIN if it was used since the survey: its owner needs it."""
        prefix = stranger.name[:2]
        if not (parse_block_name(prefix, stranger.name) or is_outdated_name(prefix, stranger.name)):
            raise OSError(errno.EINVAL, "no block file", stranger.name)
        try:
            root = open_directory(stranger.fingerprint, self._dir_fd)
        except FileNotFoundError:
            return -stranger.num_bytes
        try:
            status = os.stat(f"{prefix}/{stranger.name}", dir_fd=root, follow_symlinks=False)
            if status.st_mtime > stranger.mtime:
                raise OSError(errno.EAGAIN, "in use by another server", stranger.name)
            return self._unlink_in(root, prefix, stranger.name) - stranger.num_bytes
        except FileNotFoundError:
            return -stranger.num_bytes
        finally:
            os.close(root)

    def survey(self, request: SurveyRequest) -> Survey:
        """Record recency, reclaim what dead processes left, and look at everything there is.

        Raises OSError if the directory cannot be read.
        """
        started = time.monotonic()
        self._record_recency(request)
        inventory = _Inventory(self._name, self._block_bytes, request.known)
        with self._lock:
            adopts = self._epoch == request.epoch and not self._wipe_failed
        trash: set[str] = set()
        for file in scan(self._dir_fd):
            if file.kind is Kind.TRASH:
                trash.add(file.path.split("/", 1)[0])
            elif file.kind is not Kind.TEMPORARY:
                inventory.add(file)
            elif f"{TEMPORARY_PREFIX}{self._token}." in file.path:
                pass  # being written by this process: its reservation is charged already
            elif not reclaim_temporary(self._dir_fd, file.path):
                inventory.add(file)
        for path in trash:
            remove_tree(self._dir_fd, path)
        return inventory.survey(request, adopts, time.monotonic() - started)

    def _record_recency(self, request: SurveyRequest) -> None:
        with suppress(OSError), self._root(request.epoch, create=False) as root:
            for block, recency in request.touched.items():
                with suppress(OSError):
                    path = "/".join(block_name(block))
                    os.utime(path, (recency, recency), dir_fd=root, follow_symlinks=False)

    def wipe(self, epoch: int) -> None:
        """Start `epoch`: nothing stored before is found again, in this process or a later one.

        Raises OSError if that could not be made durable.
        """
        with self._lock:
            try:
                self._count += 1
                trash = f"{TRASH_PREFIX}{self._token}.{self._count}"
                with suppress(FileNotFoundError):
                    os.rename(self._name, trash, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)
                self._make_root()
                os.fsync(self._dir_fd)
                self._wipe_failed = False
            except OSError:
                self._wipe_failed = True  # a survey must not bring the old blocks back
                raise
            finally:
                self._epoch = epoch
                self._dirty.clear()

    def sync(self) -> None:
        """Make the names of all published blocks durable; their contents are already."""
        with self._lock:
            dirty, self._dirty = self._dirty, set()
            epoch = self._epoch
        try:
            with self._root(epoch) as root:
                for prefix in sorted(dirty):
                    with suppress(FileNotFoundError):
                        folder = open_directory(prefix, root)
                        try:
                            os.fsync(folder)
                        finally:
                            os.close(folder)
                os.fsync(root)
            os.fsync(self._dir_fd)
        except OSError:
            with self._lock:
                self._dirty |= dirty
            raise

    def close(self) -> None:
        os.close(self._dir_fd)

    @contextmanager
    def _root(self, epoch: int | None, create: bool = True) -> Iterator[int]:
        """The fingerprint's directory as it is in `epoch`; None: now.

        Opened by name each time, so that a reset by another process on the same directory is seen;
        held for the whole operation, so that a reset meanwhile cannot move it to the new one.
        """
        with self._lock:
            if epoch is not None and epoch != self._epoch:
                raise FileNotFoundError(errno.ENOENT, "overtaken by a reset", self._name)
            try:
                root = open_directory(self._name, self._dir_fd)
            except FileNotFoundError:
                if not create:
                    raise
                self._make_root()
                root = open_directory(self._name, self._dir_fd)
        try:
            yield root
        finally:
            os.close(root)

    def _make_root(self) -> None:
        try:
            os.mkdir(self._name, 0o700, dir_fd=self._dir_fd)
        except FileExistsError:
            pass
        except FileNotFoundError:  # somebody removed the whole store under us
            fresh = self._open()
            os.dup2(fresh, self._dir_fd, inheritable=False)
            os.close(fresh)


class _Inventory:
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

    def survey(self, request: SurveyRequest, adopts: bool, seconds: float) -> Survey:
        found = sorted(self._found.values(), key=lambda found: found.mtime)
        self._strangers.sort(key=lambda stranger: stranger.mtime)
        if not adopts:
            self._other_bytes += sum(block.num_bytes for block in found)
            found = []
        return Survey(
            request.epoch,
            found,
            [entry for key, entry in request.known.items() if key not in self._seen],
            self._strangers[:_MAX_STRANGERS],
            self._other_bytes,
            self._skipped,
            seconds,
        )


def read_record(fd: int, into: memoryview) -> block_file.BlockHeader:
    """Read a record's payload into `into` and return its verified header; the payload itself is
    not verified yet. Raises BlockCorruptError, OSError."""
    size = os.fstat(fd).st_size
    header_bytes = size - len(into)
    if not 0 < header_bytes <= block_file.MAX_HEADER_BYTES:
        raise BlockCorruptError("size", f"{size} bytes for a payload of {len(into)}")
    header = bytearray(header_bytes)
    views = [memoryview(header), into]
    offset = 0
    while views:
        count = os.preadv(fd, views, offset)
        if not count:
            raise BlockCorruptError("size", f"ends after {offset} of {size} bytes")
        offset += count
        views = _advance(views, count)
    return block_file.decode_header(header)


def _write_all(fd: int, *parts: bytes | memoryview) -> None:
    views = [memoryview(part) for part in parts]
    while views:
        views = _advance(views, os.writev(fd, views))


def _advance(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `views` after `count` bytes."""
    while views and count >= len(views[0]):
        count -= len(views[0])
        views = views[1:]
    return [views[0][count:], *views[1:]] if views else []


def _open_message(directory: Path, error: OSError) -> str:
    cause = error.strerror or str(error)
    mend = {
        errno.ENOTDIR: "choose a directory that is no symbolic link and has no file above it",
        errno.ELOOP: "choose a directory that is no symbolic link",
        errno.EROFS: "mount it writable or choose another directory",
        errno.EACCES: "make it writable for this user or choose another directory",
        errno.EPERM: "make it writable for this user or choose another directory",
    }.get(error.errno or 0, "choose a directory that can be created and written")
    return f"disk tier {directory}: {cause}; {mend}"
