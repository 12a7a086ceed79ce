"""What lies in a disk tier's directory, by names and `stat` alone.

    DIR/                                    0700
      <fingerprint, 64 hex>/                0700  one per model and everything that changes its KV
        <first 2 hex of the hash>/
          <block hash, 64 hex>.<group>.<root, 16 hex>.<parent, 16 hex>.kv
                                            0600  a published record, see block_file
        .tmp.<pid>.<token>.<n>              0600  being written; its writer holds a lock on it
      .ledger                               0600  how many bytes all this occupies, see ledger
      <fingerprint, 64 hex>.side*           0600  small records beside its blocks, see side_file;
                                                  .side.bad was found damaged, and
                                                  .side.claim.* see side_claim
      .trash.<pid>.<token>.<n>/             what a reset renamed away; nobody reads it

A name says what an index wants to know without opening the file: the block, and the beginnings of
the hashes of its chain's root and of its parent. Names of format 1 end after the group.

No symbolic link is followed: one is FOREIGN, like everything else that this drawing lacks.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from offload.block_file import BlockName
from offload.ledger import LEDGER_NAME
from offload.tier import BlockHash, BlockKey, MetasUnder

TEMPORARY_PREFIX = ".tmp."
TRASH_PREFIX = ".trash."
SIDE_SUFFIX = ".side"
SUFFIX = ".kv"
OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_ELSEWHERE = 16  # fingerprints looked into for an explanation
OPEN_RECORD = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

_HEX = frozenset("0123456789abcdef")
_NAME = re.compile(r"([0-9a-f]{64})\.(0|[1-9][0-9]{0,8})\.([0-9a-f]{16})\.([0-9a-f]{16})\.kv")
_NAME_1 = re.compile(r"[0-9a-f]{64}\.(0|[1-9][0-9]{0,8})\.kv")  # of format 1


class Kind(Enum):
    """What a name in the store stands for."""

    BLOCK = "block"
    OUTDATED = "outdated"  # a block of a format that is no longer read
    SIDE = "side"  # of a fingerprint, but no block
    TEMPORARY = "temporary"
    TRASH = "trash"
    FOREIGN = "foreign"
    DIRECTORY = "directory"  # of the store itself, and its ledger: only their own bytes matter


class StoreFile(NamedTuple):
    """One file or directory of the store; bytes and seconds since the epoch."""

    kind: Kind
    path: str  # relative to the store's directory
    fingerprint: str | None  # hex
    block: BlockName | None  # of a BLOCK
    size_bytes: int
    physical_bytes: int
    mtime: float


def block_name(block: BlockName) -> tuple[str, str]:
    """Directory (two hex digits) and file name of a block below its fingerprint's directory."""
    digits, group = block.key.block_hash.hex(), block.key.group
    tags = f"{block.root_tag.hex()}.{block.parent_tag.hex()}"
    return digits[:2], f"{digits}.{group}.{tags}{SUFFIX}"


def parse_block_name(prefix: str, name: str) -> BlockName | None:
    """What `block_name` made this name of, or None."""
    match = _NAME.fullmatch(name)
    if match is None or not name.startswith(prefix):
        return None
    digits, group, root, parent = match.groups()
    key = BlockKey(BlockHash(bytes.fromhex(digits)), int(group))
    return BlockName(key, bytes.fromhex(root), bytes.fromhex(parent))


def is_outdated_name(prefix: str, name: str) -> bool:
    """Whether an older format gave this name to a block."""
    return name.startswith(prefix) and _NAME_1.fullmatch(name) is not None


def is_fingerprint(name: str) -> bool:
    """Whether a name in the store's directory is that of a fingerprint."""
    return len(name) == 64 and _HEX.issuperset(name)


def side_path(directory: Path, fingerprint: bytes) -> Path:
    """Where the side store of a fingerprint lies."""
    return directory / f"{fingerprint.hex()}{SIDE_SUFFIX}"


def is_side_name(name: str) -> bool:
    """Whether a name in the store's directory is kept beside a fingerprint's blocks."""
    return name[64:].startswith(SIDE_SUFFIX) and is_fingerprint(name[:64])


def open_directory(name: str, dir_fd: int | None = None) -> int:
    """A descriptor of a directory that is no symbolic link. Raises OSError."""
    return os.open(name, OPEN_DIRECTORY, dir_fd=dir_fd)


@contextmanager
def entries_of(dir_fd: int) -> Iterator[Iterator[os.DirEntry[str]]]:
    """What lies in a directory. A descriptor has one position for all who read names by it, so that
    of two threads each would miss some: hence one of its own for each reading."""
    own = open_directory(".", dir_fd)
    try:
        with os.scandir(own) as entries:
            yield entries
    finally:
        os.close(own)


def scan(dir_fd: int) -> Iterator[StoreFile]:
    """Everything in the store, directories included. What vanishes meanwhile is left out.

    Raises OSError only if the store's own directory cannot be read.
    """
    yield _described(Kind.DIRECTORY, ".", None, os.fstat(dir_fd))
    with entries_of(dir_fd) as entries:
        for entry in entries:
            is_directory = entry.is_dir(follow_symlinks=False)
            if is_directory and is_fingerprint(entry.name):
                yield from scan_fingerprint(dir_fd, entry.name)
            elif is_directory:
                kind = Kind.TRASH if entry.name.startswith(TRASH_PREFIX) else Kind.FOREIGN
                yield from _scan_tree(dir_fd, entry.name, kind, None, entry.name)
            elif is_side_name(entry.name):
                yield from _other(entry, entry.name, Kind.SIDE, entry.name[:64])
            elif entry.name == LEDGER_NAME:
                yield from _other(entry, entry.name, Kind.DIRECTORY, None)
            else:
                yield from _other(entry, entry.name, Kind.FOREIGN, None)


def scan_fingerprint(dir_fd: int, fingerprint: str) -> Iterator[StoreFile]:
    """Everything below one fingerprint's directory."""
    try:
        root = open_directory(fingerprint, dir_fd)
    except OSError:
        return
    try:
        yield _described(Kind.DIRECTORY, fingerprint, fingerprint, os.fstat(root))
        with os.scandir(root) as entries:
            for entry in entries:
                path = f"{fingerprint}/{entry.name}"
                is_directory = entry.is_dir(follow_symlinks=False)
                if is_directory and len(entry.name) == 2 and _HEX.issuperset(entry.name):
                    yield from _scan_prefix(root, fingerprint, entry.name)
                elif is_directory:
                    yield from _scan_tree(root, entry.name, Kind.FOREIGN, fingerprint, path)
                elif entry.name.startswith(TEMPORARY_PREFIX):
                    yield from _other(entry, path, Kind.TEMPORARY, fingerprint)
                else:
                    yield from _other(entry, path, Kind.FOREIGN, fingerprint)
    finally:
        os.close(root)


def _scan_prefix(root: int, fingerprint: str, prefix: str) -> Iterator[StoreFile]:
    try:
        fd = open_directory(prefix, root)
    except OSError:
        return
    try:
        yield _described(Kind.DIRECTORY, f"{fingerprint}/{prefix}", fingerprint, os.fstat(fd))
        with os.scandir(fd) as entries:
            for entry in entries:
                path = f"{fingerprint}/{prefix}/{entry.name}"
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if stat.S_ISDIR(status.st_mode):
                    yield from _scan_tree(fd, entry.name, Kind.FOREIGN, fingerprint, path)
                    continue
                kind, block = Kind.FOREIGN, None
                if stat.S_ISREG(status.st_mode):
                    block = parse_block_name(prefix, entry.name)
                    if block is not None:
                        kind = Kind.BLOCK
                    elif is_outdated_name(prefix, entry.name):
                        kind = Kind.OUTDATED
                yield _described(kind, path, fingerprint, status, block)
    finally:
        os.close(fd)


def _other(
    entry: os.DirEntry[str], path: str, kind: Kind, fingerprint: str | None
) -> Iterator[StoreFile]:
    with suppress(OSError):
        status = entry.stat(follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            kind = Kind.FOREIGN
        yield _described(kind, path, fingerprint, status)


def _scan_tree(
    dir_fd: int, name: str, kind: Kind, fingerprint: str | None, path: str
) -> Iterator[StoreFile]:
    with suppress(OSError):  # raised when the tree itself vanishes before it is opened
        for folder, _, names, fd in os.fwalk(name, dir_fd=dir_fd, follow_symlinks=False):
            where = path + folder.removeprefix(name)
            yield _described(kind, where, fingerprint, os.fstat(fd))
            for leaf in names:
                with suppress(OSError):
                    status = os.stat(leaf, dir_fd=fd, follow_symlinks=False)
                    yield _described(kind, f"{where}/{leaf}", fingerprint, status)


def _described(
    kind: Kind,
    path: str,
    fingerprint: str | None,
    status: os.stat_result,
    block: BlockName | None = None,
) -> StoreFile:
    size_bytes, physical_bytes = status.st_size, status.st_blocks * 512
    return StoreFile(kind, path, fingerprint, block, size_bytes, physical_bytes, status.st_mtime)


def find_elsewhere(dir_fd: int, own: str, metas_under: MetasUnder) -> dict[int, str]:
    """Which blocks of a chain other fingerprints hold, by names alone: index and fingerprint.

    Raises OSError if the store's directory cannot be read.
    """
    found: dict[int, str] = {}
    with entries_of(dir_fd) as entries:
        others = sorted(e.name for e in entries if is_fingerprint(e.name) and e.name != own)
    for fingerprint in others[:_MAX_ELSEWHERE]:
        for index, (key, meta) in enumerate(metas_under(bytes.fromhex(fingerprint))):
            folder, name = block_name(BlockName(key, meta.root_tag, meta.parent_tag))
            try:
                os.stat(f"{fingerprint}/{folder}/{name}", dir_fd=dir_fd, follow_symlinks=False)
            except OSError:
                break  # a chain: what follows a gap serves nobody
            found.setdefault(index, fingerprint)
    return found


def reclaim_temporary(dir_fd: int, path: str) -> bool:
    """Remove a temporary file whose writer is dead; False if it lives or the file is gone.

    A writer holds an exclusive lock on its file from creation to publication, and after locking
    checks that the name is still its own, so taking the lock here proves that nobody writes.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path, dir_fd=dir_fd)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def remove_tree(dir_fd: int, path: str) -> None:
    """Remove a directory of the store and all below it, following no link; what cannot be removed
    stays for the next attempt."""
    with suppress(OSError):
        for _, folders, names, fd in os.fwalk(path, topdown=False, dir_fd=dir_fd):
            for name in names:
                with suppress(OSError):
                    os.unlink(name, dir_fd=fd)
            for name in folders:
                try:
                    os.rmdir(name, dir_fd=fd)
                except OSError:
                    with suppress(OSError):  # fwalk lists a link to a directory here
                        os.unlink(name, dir_fd=fd)
        os.rmdir(path, dir_fd=dir_fd)
