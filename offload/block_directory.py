"""Block files in a directory: the blocking half of the disk tier. Runs on I/O threads.

    store    evict, charge, temporary file -> write -> fdatasync -> rename into place -> close
    fetch    open -> read into place -> verify
    remove   unlink -> drop the directory if that emptied it
    survey   what is really there; dead writers' leftovers are reclaimed on the way
    wipe     rename the fingerprint's directory away -> fsync
    erase    unlink the blocks of some chains -> fsync

What changes the bytes in the directory happens under the lock of the ledger, which all servers on
the directory share: evict and charge in one, publish and settle in one. Between them, and so
without it, the content is written, into bytes that are charged already.

Every operation names the epoch in which it was asked for. `wipe` starts a new one, and an operation
of an older epoch finds nothing and publishes nothing: a save that a reset overtook either is
refused, or ends in the directory that was renamed away.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from offload import block_file
from offload.block_file import BlockName
from offload.draft import Draft, charged_bytes, create_draft
from offload.ledger import Account, Ledger
from offload.record_io import read_record, write_all
from offload.side_claim import SideClaim, SideClaims
from offload.store_changes import (
    directory_bytes,
    rename_into_place,
    unlink_block,
    unlink_in,
    unlink_stranger,
)
from offload.store_scan import (
    OPEN_RECORD,
    TEMPORARY_PREFIX,
    TRASH_PREFIX,
    Kind,
    StoreFile,
    block_name,
    entries_of,
    find_elsewhere,
    open_directory,
    parse_block_name,
    reclaim_temporary,
    remove_tree,
    scan,
)
from offload.store_survey import (
    Inventory,
    Survey,
    SurveyRequest,
    future_bytes,
    measure_store,
)
from offload.tier import (
    BlockKey,
    BlockMeta,
    Forget,
    FoundBlock,
    MetasUnder,
    RoomTakenError,
    StrangerFile,
    TierOpenError,
    WriteResult,
)


class BlockDirectory:
    """The block files of one fingerprint in a directory that may be shared."""

    def __init__(
        self,
        directory: Path,
        fingerprint: bytes,
        block_bytes: int,
        capacity_bytes: int,
        side_bytes: int = 0,
    ) -> None:
        """Create, open, and claim `side_bytes` for the side store; nothing is scanned yet. Raises
        TierOpenError."""
        self._path = directory
        self._fingerprint = fingerprint
        self._name = fingerprint.hex()
        self._block_bytes = block_bytes
        self._capacity_bytes = capacity_bytes
        self._claim = SideClaim(self._name, side_bytes)
        self._token = f"{os.getpid()}.{secrets.token_hex(4)}"
        # Epoch, descriptor, counter, names; never taken by the planner. After the ledger's.
        self._lock = threading.Lock()
        self._epoch = 0
        self._count = 0
        self._wipe_failed = False
        self._unerased: list[Forget] = []
        self._dirty: set[str] = set()
        self._writing: set[str] = set()  # temporary files of this process
        with ExitStack() as opened:
            try:
                self._dir_fd = self._open()
                opened.callback(os.close, self._dir_fd)
                self.unit_bytes = max(512, os.fstatvfs(self._dir_fd).f_bsize)  # of growth
                self._ledger = Ledger(self._dir_fd, self._measure)
                self._probe()
                self._claim_side_bytes()
            except OSError as error:
                raise TierOpenError(_open_message(directory, error)) from error
            opened.pop_all()

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
        return dir_fd

    def _probe(self) -> None:
        """Make and remove an empty file. A full disk passes: what it holds can still be read, and
        saving resumes when there is room."""
        try:
            with self._accounting() as account:
                with self._opened_root(0) as root:
                    if root is None:
                        if account.occupied + self.unit_bytes > self._capacity_bytes:
                            return  # the first block makes it, in the room of what it evicts
                        account.charge(self.unit_bytes)
                root = self._root(0)
                try:
                    draft = self._create_temporary(root, 0)
                except BaseException:
                    os.close(root)
                    raise
                os.unlink(draft.name, dir_fd=root)
                self._discard(draft)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def _claim_side_bytes(self) -> None:
        """Others must leave room for our side store from now on. On a full disk it has none."""
        try:
            with self._accounting() as account:
                self._claim.hold(self._dir_fd)
                account.charge(self._claim.num_bytes)  # for surveys that have looked already
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def needed_bytes(self, num_tokens: int) -> int:
        """What storing a block may add at most, directories included."""
        record_bytes = block_file.record_bytes(num_tokens, self._block_bytes)
        return charged_bytes(record_bytes, self.unit_bytes)

    @contextmanager
    def _accounting(self) -> Iterator[Account]:
        """The ledger, locked, of the store as it is now."""
        with ExitStack() as locked:
            try:
                account = locked.enter_context(self._ledger.locked())
            except FileNotFoundError:
                self._reopen()
                account = locked.enter_context(self._ledger.locked())
            yield account

    def _reopen(self) -> None:
        """Somebody removed the whole store under us: make it again."""
        fresh = self._open()
        os.dup2(fresh, self._dir_fd, inheritable=False)
        os.close(fresh)
        self._claim.hold(self._dir_fd)

    def store(
        self,
        epoch: int,
        block: BlockName,
        meta: BlockMeta,
        payload: memoryview,
        evict: Sequence[BlockName],
        strangers: Sequence[StrangerFile],
        wanted: Callable[[], bool],
    ) -> WriteResult:
        """Evict, then write and publish one block, unless it is no longer `wanted` by then.

        Errors come in the result, with what was evicted before them; RoomTakenError where other
        servers took the room meanwhile. Nothing is written until all that should go is gone.
        """
        removed: set[BlockKey] = set()
        other_bytes = 0
        try:
            header = block_file.encode_header(self._fingerprint, block.key, meta, payload)
            with self._accounting() as account:
                with self._opened_root(epoch) as root:
                    for victim in evict:
                        if root is not None:
                            other_bytes += unlink_block(root, victim, account)
                        removed.add(victim.key)
                for stranger in strangers:
                    other_bytes += unlink_stranger(self._dir_fd, stranger, account)
                draft = self._draft(epoch, len(header) + payload.nbytes, account)
            try:
                write_all(draft.fd, header, payload)
                os.fdatasync(draft.fd)
                num_bytes = self._publish(draft, block, wanted)
            finally:
                self._discard(draft)
            return WriteResult(None, num_bytes, frozenset(removed), other_bytes + draft.grown)
        except (OSError, RoomTakenError) as error:
            return WriteResult(error, 0, frozenset(removed), other_bytes)

    def _draft(self, epoch: int, record_bytes: int, account: Account) -> Draft:
        """Charge for a record and create the file that will hold it."""
        charge = charged_bytes(record_bytes, self.unit_bytes)
        if account.occupied + charge > self._capacity_bytes:
            raise RoomTakenError(account.occupied)
        account.charge(charge)
        try:
            with self._opened_root(epoch) as root:
                before = directory_bytes(root)
            root = self._root(epoch)
            try:
                draft = self._create_temporary(root, record_bytes)
            except BaseException:
                os.close(root)
                raise
        except BaseException:
            account.release(charge)
            raise
        draft.charge = charge
        draft.grown = directory_bytes(root) - before
        return draft

    def _create_temporary(self, root: int, num_bytes: int) -> Draft:
        """A fresh temporary file. `root` is the draft's from then on."""
        while True:
            with self._lock:
                self._count += 1
                name = f"{TEMPORARY_PREFIX}{self._token}.{self._count}"
            self._writing.add(name)
            draft = None
            try:
                draft = create_draft(root, name, num_bytes)
                if draft is not None:
                    return draft
            finally:
                if draft is None:
                    self._writing.discard(name)

    def _publish(self, draft: Draft, block: BlockName, wanted: Callable[[], bool]) -> int:
        """Give a written record its name; the bytes that it occupies."""
        with self._accounting() as account:
            if not wanted():
                raise FileNotFoundError(errno.ENOENT, "overtaken by a reset", draft.name)
            num_bytes = os.fstat(draft.fd).st_blocks * 512
            before = directory_bytes(draft.root)
            grown, replaced = rename_into_place(draft.root, draft.name, block)
            draft.grown += grown + directory_bytes(draft.root) - before
            account.exchange(draft.charge + replaced, num_bytes + draft.grown)
            draft.charge = 0
        with self._lock:
            self._dirty.add(block_name(block)[0])
        return num_bytes

    def _discard(self, draft: Draft) -> None:
        """Close a draft. What was not published is removed, and its charge taken back.

        The lock that marks the file as alive lasts until close, hence the close at the end.
        """
        try:
            if draft.charge:
                with suppress(OSError):
                    os.unlink(draft.name, dir_fd=draft.root)
                    with self._accounting() as account:
                        account.release(draft.charge)
        finally:
            self._writing.discard(draft.name)
            os.close(draft.fd)
            os.close(draft.root)

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
        with self._opened_root(None) as root:
            folder = open_directory(prefix, _existing(root))
            try:
                fd = os.open(name, OPEN_RECORD, dir_fd=folder)
            finally:
                os.close(folder)
        try:
            yield fd
        finally:
            os.close(fd)

    def path_of(self, block: BlockName) -> Path:
        """Where a stored block lies, for a person to look at."""
        return self._path.joinpath(self._name, *block_name(block))

    def find_elsewhere(self, metas_under: MetasUnder) -> dict[int, str]:
        """See `store_scan.find_elsewhere`. Raises OSError if the directory cannot be read."""
        return find_elsewhere(self._dir_fd, self._name, metas_under)

    def remove(self, epoch: int, block: BlockName) -> WriteResult:
        """Unlink one block; one already gone counts as removed."""
        try:
            with self._accounting() as account, self._opened_root(epoch) as root:
                other_bytes = 0 if root is None else unlink_block(root, block, account)
        except OSError as error:
            return WriteResult(error)
        return WriteResult(removed=frozenset((block.key,)), other_bytes=other_bytes)

    def survey(self, request: SurveyRequest) -> Survey:
        """Record recency, reclaim what dead processes and resets left, remove what has expired,
        look at everything there is, and correct the ledger by it.

        Raises OSError if the directory cannot be read.
        """
        started = time.monotonic()
        self._record_recency(request)
        with entries_of(self._dir_fd) as entries:
            trash = [entry.name for entry in entries if entry.name.startswith(TRASH_PREFIX)]
        for name in trash:
            remove_tree(self._dir_fd, name)
        mark = None
        with suppress(OSError), self._accounting() as account:
            mark = account.mark()
        inventory = Inventory(self._name, self._block_bytes, request.known)
        claims = SideClaims(self._dir_fd)
        scanned = 0
        expired: list[StoreFile] = []
        for file in scan(self._dir_fd):
            if file.kind is Kind.TEMPORARY:
                name = file.path.rsplit("/", 1)[1]
                if name not in self._writing:
                    if reclaim_temporary(self._dir_fd, file.path):
                        continue
                    inventory.add(file)
                scanned += future_bytes(file, self.unit_bytes)
                continue
            if inventory.expires(file, request.expire_before):
                expired.append(file)
            else:
                inventory.add(file)
            if file.kind is Kind.SIDE:
                claims.add(file)
            scanned += file.physical_bytes
        inventory.adjust(claims.growth)
        scanned += claims.growth
        for file in expired:
            change = self._remove_expired(file, request.expire_before)
            if change is None:
                inventory.add(file)
            else:
                inventory.adjust(change)
        with suppress(OSError), self._accounting() as account:
            if mark is not None:
                account.reconcile(mark, scanned)
        with self._lock:
            adopts = self._epoch == request.epoch and not self._wipe_failed
            unerased = tuple(self._unerased)

        def adoptable(found: FoundBlock) -> bool:
            return adopts and not any(
                where.matches(found.key, found.root_tag) for where in unerased
            )

        status = os.fstatvfs(self._dir_fd)
        return inventory.survey(
            request,
            adopts=None if adopts and not unerased else adoptable,
            free_bytes=status.f_bavail * status.f_frsize,
            seconds=time.monotonic() - started,
        )

    def _measure(self) -> int:
        return measure_store(self._dir_fd, self.unit_bytes)

    def _remove_expired(self, file: StoreFile, before: float) -> int | None:
        """Change in directory bytes; None if it stays."""
        with suppress(OSError), self._accounting() as account, self._opened_root(None) as root:
            _, prefix, name = file.path.split("/")
            status = os.stat(f"{prefix}/{name}", dir_fd=_existing(root), follow_symlinks=False)
            if status.st_mtime < before:
                return unlink_in(_existing(root), prefix, name, account)
        return None

    def _record_recency(self, request: SurveyRequest) -> None:
        with suppress(OSError), self._opened_root(request.epoch) as root:
            if root is None:
                return
            for block, recency in request.touched.items():
                with suppress(OSError):
                    path = "/".join(block_name(block))
                    os.utime(path, (recency, recency), dir_fd=root, follow_symlinks=False)

    def wipe(self, epoch: int) -> None:
        """Start `epoch`: nothing stored before is found again, in this process or a later one.

        Raises OSError if that could not be made durable.
        """
        try:
            with self._accounting() as account, self._lock:
                self._count += 1
                trash = f"{TRASH_PREFIX}{self._token}.{self._count}"
                with suppress(FileNotFoundError):
                    os.rename(self._name, trash, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)
                    account.moved()
            os.fsync(self._dir_fd)
        except OSError:
            self._begin_epoch(epoch, wipe_failed=True)
            raise
        self._begin_epoch(epoch, wipe_failed=False)

    def _begin_epoch(self, epoch: int, wipe_failed: bool) -> None:
        with self._lock:
            self._epoch = epoch
            self._wipe_failed = wipe_failed  # a survey must not bring the old blocks back
            self._dirty.clear()
            if not wipe_failed:
                self._unerased.clear()

    def erase(self, where: Forget) -> None:
        """Unlink every block of some chains, durably. The caller has seen to it that none of them
        is `wanted` any more.

        Raises OSError if some may be found again by a later process.
        """
        with self._lock:
            before = tuple(self._unerased)
        try:
            with self._accounting():
                pass  # what was published before is seen below; who comes later asks first
            with self._opened_root(None) as root:
                if root is not None:
                    for prefix in os.listdir(root):
                        if len(prefix) == 2:
                            self._erase_in(root, prefix, where)
                    os.fsync(root)
        except OSError:
            with self._lock:
                self._unerased.append(where)
            raise
        with self._lock:  # what failed meanwhile may have met what came meanwhile
            left = [one.without(where) if one in before else one for one in self._unerased]
            self._unerased = [one for one in left if one.roots or one.keys]

    def _erase_in(self, root: int, prefix: str, where: Forget) -> None:
        try:
            folder = open_directory(prefix, root)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            blocks = [parse_block_name(prefix, name) for name in os.listdir(folder)]
            found = [block for block in blocks if block and where.matches(*block[:2])]
            if found:
                with self._accounting() as account:
                    for block in found:
                        unlink_block(root, block, account)
                os.fsync(folder)
        finally:
            os.close(folder)

    def sync(self) -> None:
        """Make the names of all published blocks durable; their contents are already."""
        with self._lock:
            dirty, self._dirty = self._dirty, set()
            epoch = self._epoch
        try:
            with self._opened_root(epoch) as root:
                if root is not None:
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
        self._claim.close()
        os.close(self._dir_fd)

    @contextmanager
    def _opened_root(self, epoch: int | None) -> Iterator[int | None]:
        """The fingerprint's directory as it is in `epoch`, or None if there is none; None: now.

        Opened by name each time, so that a reset by another process on the same directory is seen;
        held for the whole operation, so that a reset meanwhile cannot move it to the new one.
        """
        with self._lock:
            self._demand(epoch)
            try:
                root = open_directory(self._name, self._dir_fd)
            except FileNotFoundError:
                root = None
        try:
            yield root
        finally:
            if root is not None:
                os.close(root)

    def _root(self, epoch: int) -> int:
        """The same, made if there is none. The caller has charged for it, and closes it."""
        with self._lock:
            self._demand(epoch)
            with suppress(FileExistsError):
                os.mkdir(self._name, 0o700, dir_fd=self._dir_fd)
            return open_directory(self._name, self._dir_fd)

    def _demand(self, epoch: int | None) -> None:
        if epoch is not None and epoch != self._epoch:
            raise FileNotFoundError(errno.ENOENT, "overtaken by a reset", self._name)


def _existing(root: int | None) -> int:
    if root is None:
        raise FileNotFoundError(errno.ENOENT, "nothing is stored")
    return root


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
