"""`overwinter store`: look into a disk tier's directory, check it, clear it out.

Safe beside a running server: it takes a file that `gc` removed as a miss. Exit codes: 0 fine,
1 bad records found, 2 the directory cannot be read.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from offload import side_file
from offload.block_file import BlockCorruptError
from offload.store_audit import audit
from offload.store_scan import (
    SIDE_SUFFIX,
    Kind,
    StoreFile,
    open_directory,
    reclaim_temporary,
    remove_tree,
    scan,
)


@dataclass(slots=True)
class _Totals:
    """Files and bytes of one line of `stat`."""

    files: int = 0
    num_bytes: int = 0
    oldest: float = float("inf")
    newest: float = 0.0

    def add(self, file: StoreFile) -> None:
        self.files += 1
        self.num_bytes += file.physical_bytes
        self.oldest = min(self.oldest, file.mtime)
        self.newest = max(self.newest, file.mtime)


def store_ls(directory: Path, *, fingerprint: str | None = None) -> int:
    """List the stored blocks, oldest use first; `fingerprint` keeps those that start with it."""

    def run(dir_fd: int) -> int:
        blocks = [
            file
            for file in scan(dir_fd)
            if file.kind is Kind.BLOCK and (file.fingerprint or "").startswith(fingerprint or "")
        ]
        blocks.sort(key=lambda file: file.mtime)
        rows = []
        for file in blocks:
            assert file.block is not None
            rows.append(
                (
                    (file.fingerprint or "")[:12],
                    file.block.key.block_hash.hex(),
                    str(file.block.key.group),
                    _size(file.physical_bytes),
                    _when(file.mtime),
                )
            )
        _print_table(("FINGERPRINT", "HASH", "GROUP", "SIZE", "LAST USED"), rows)
        return 0

    return _with_directory(directory, run)


def store_stat(directory: Path) -> int:
    """Sum up: blocks by fingerprint, and whatever else lies there, in bytes on disk."""

    def run(dir_fd: int) -> int:
        blocks: dict[str, _Totals] = {}
        others = {kind: _Totals() for kind in Kind if kind is not Kind.BLOCK}
        total = _Totals()
        for file in scan(dir_fd):
            total.add(file)
            if file.kind is Kind.BLOCK:
                blocks.setdefault(file.fingerprint or "", _Totals()).add(file)
            else:
                others[file.kind].add(file)
        rows = [
            (name, str(sums.files), _size(sums.num_bytes), _when(sums.oldest), _when(sums.newest))
            for name, sums in sorted(blocks.items(), key=lambda item: item[1].newest)
        ]
        _print_table(("FINGERPRINT", "BLOCKS", "SIZE", "OLDEST USE", "LAST USE"), rows)
        print()
        names = {
            Kind.OUTDATED: "blocks of older formats",
            Kind.SIDE: "side records",
            Kind.TEMPORARY: "temporary files",
            Kind.TRASH: "reset leftovers",
            Kind.FOREIGN: "foreign files",
            Kind.DIRECTORY: "directories",
        }
        rows2 = [
            (names[kind], str(sums.files), _size(sums.num_bytes)) for kind, sums in others.items()
        ]
        rows2.append(("total", str(total.files), _size(total.num_bytes)))
        _print_table(("OTHER", "FILES", "SIZE"), rows2)
        return 0

    return _with_directory(directory, run)


def store_verify(directory: Path) -> int:
    """Read every block, count the good ones, report bad ones and bad side records; 1 if any."""

    def run(dir_fd: int) -> int:
        num_good = num_side = 0
        bad = []
        for file in scan(dir_fd):
            num_side += file.kind is Kind.SIDE
            if file.kind is Kind.SIDE and file.path.endswith(SIDE_SUFFIX):
                problem = side_file.problem(directory / file.path)
            elif file.kind is Kind.BLOCK:
                problem = _problem(dir_fd, file)
            else:
                continue
            if problem is None:
                num_good += file.kind is Kind.BLOCK
            elif problem:
                bad.append((file.path, problem))
        if bad:
            _print_table(("BAD RECORD", "WHY"), bad)
            print()
        print(f"{num_good} good, {len(bad)} bad")
        if not num_good and not num_side and not bad:
            print(f"{directory}: holds no blocks; is it a --disk-tier directory?", file=sys.stderr)
        return 1 if bad else 0

    return _with_directory(directory, run)


def store_gc(
    directory: Path,
    *,
    keep_fingerprint: Sequence[str] = (),
    max_age: float | None = None,
    dry_run: bool = False,
) -> int:
    """Remove dead writers' temporary files, what resets left, and damaged or other-format records.

    With `keep_fingerprint`, also the blocks of all other fingerprints (full hex or a beginning);
    with `max_age`, also blocks not used for that many seconds. Files that are no part of a store
    stay. `dry_run` only says what would go.
    """

    def run(dir_fd: int) -> int:
        known = {file.fingerprint for file in scan(dir_fd) if file.fingerprint is not None}
        for wanted in keep_fingerprint:
            if not any(name.startswith(wanted) for name in known):
                # A typing error must not empty the store.
                print(f"{directory}: no fingerprint starts with {wanted!r}", file=sys.stderr)
                return 2
        removed = _Totals()
        rows = []
        for file, why in _condemned(dir_fd, keep_fingerprint, max_age):
            if dry_run or _remove(dir_fd, file):
                removed.add(file)
                rows.append((file.path, why))
        if not dry_run:
            _drop_empty_directories(dir_fd)
        _print_table(("WOULD REMOVE" if dry_run else "REMOVED", "WHY"), rows)
        print()
        print(f"{removed.files} files, {_size(removed.num_bytes)}")
        return 0

    return _with_directory(directory, run)


def _condemned(
    dir_fd: int, keep_fingerprint: Sequence[str], max_age: float | None
) -> Iterator[tuple[StoreFile, str]]:
    now = time.time()
    for file in list(scan(dir_fd)):
        if file.kind is Kind.TEMPORARY:
            yield file, "temporary, if its writer is dead"
        elif file.kind is Kind.TRASH and "/" not in file.path:
            yield file, "left by a reset"
        elif file.kind is Kind.OUTDATED:
            yield file, "older format"
        elif file.kind is Kind.SIDE:
            if keep_fingerprint and not (file.fingerprint or "").startswith(
                tuple(keep_fingerprint)
            ):
                yield file, "other fingerprint"
            elif file.path.endswith(side_file.SET_ASIDE_SUFFIX):
                yield file, "set aside as damaged"
        elif file.kind is Kind.BLOCK:
            name = file.fingerprint or ""
            if keep_fingerprint and not any(name.startswith(kept) for kept in keep_fingerprint):
                yield file, "other fingerprint"
            elif max_age is not None and now - file.mtime > max_age:
                yield file, f"not used for {_duration(now - file.mtime)}"
            elif problem := _problem(dir_fd, file):
                yield file, problem


def _remove(dir_fd: int, file: StoreFile) -> bool:
    if file.kind is Kind.TEMPORARY:
        return reclaim_temporary(dir_fd, file.path)
    if file.kind is Kind.TRASH:
        remove_tree(dir_fd, file.path)
        return True
    try:
        os.unlink(file.path, dir_fd=dir_fd)
    except OSError:
        return False
    return True


def _drop_empty_directories(dir_fd: int) -> None:
    folders = [file.path for file in scan(dir_fd) if file.kind is Kind.DIRECTORY]
    for path in sorted(folders, key=lambda path: -path.count("/")):
        if path != ".":
            try:
                os.rmdir(path, dir_fd=dir_fd)
            except OSError:
                continue


def _problem(dir_fd: int, file: StoreFile) -> str | None:
    """What is wrong with a record; None if nothing is, "" if it is gone."""
    try:
        audit(dir_fd, file)
    except FileNotFoundError:
        return ""
    except BlockCorruptError as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _with_directory(directory: Path, run: Callable[[int], int]) -> int:
    try:
        with _opened(directory) as dir_fd:
            code = run(dir_fd)
            sys.stdout.flush()  # a reader who has left shows here, not when Python ends
            return code
    except BrokenPipeError:  # whoever read the table has seen enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(
            f"{directory}: {error.strerror}; name the directory given to --disk-tier",
            file=sys.stderr,
        )
        return 2


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    dir_fd = open_directory(str(directory))
    try:
        yield dir_fd
    finally:
        os.close(dir_fd)


def _print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = [header, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())


def _size(num_bytes: int) -> str:
    if num_bytes < 1 << 10:
        return f"{num_bytes} B"
    for unit, length in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= length:
            return f"{num_bytes / length:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
