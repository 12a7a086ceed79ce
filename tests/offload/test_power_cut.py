"""The power is cut after each single operation: what had no sync is lost, and nothing is wrong.

Two states of the medium are built for every instant, from what really happened to the files. In
both, content that was not synced reads as zeros. `eager`: every name is as it was; `lazy`: a
directory is as it was when it was last synced.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from offload.disk_tier import DiskTier
from offload.ledger import LEDGER_NAME
from offload.store_scan import block_name
from offload.tier import BlockKey, Forget
from tests.offload.harness import (
    BLOCK_BYTES,
    FINGERPRINT,
    RECORD_BYTES,
    content,
    key,
    meta,
    named,
)

OpenDisk = Callable[..., DiskTier]
Inode = tuple[int, int]
Tree = dict[str, bytes]  # path below the store: content
CALLS = ("open", "mkdir", "writev", "ftruncate", "fdatasync", "rename", "unlink", "rmdir", "fsync")
ONE = Forget(keys=frozenset({key(1)}))
NUMBERS = {key(number): number for number in range(100)}


class Medium:
    """What would be left of a directory if the power went now."""

    def __init__(self, path: Path, after: Callable[[], None]) -> None:
        self._path = path
        self._after = after
        self._lives: dict[int, int] = {}  # of an inode's number, which is given again
        self._synced: dict[Inode, bytes] = {}  # contents
        self._listed: dict[Inode, dict[str, Inode]] = {}  # names in a directory
        self.steps: list[tuple[str, str]] = []

    @contextmanager
    def watched(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        with patch.context() as context:
            for name in CALLS:
                context.setattr(os, name, self._wrap(name, getattr(os, name)))
            yield

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            creates = name == "open" and args[1] & os.O_CREAT
            result = real(*args, **options)
            if name == "open" and not creates:
                return result
            if (creates and args[1] & os.O_EXCL) or name == "mkdir":
                number = os.stat(args[0], dir_fd=options["dir_fd"]).st_ino
                self._lives[number] = self._lives.get(number, 0) + 1
            elif name == "fdatasync":
                self._synced[self._inode(os.fstat(args[0]))] = read_fd(args[0])
            elif name == "fsync":
                self._listed[self._inode(os.fstat(args[0]))] = {
                    leaf: self._inode(os.stat(leaf, dir_fd=args[0])) for leaf in os.listdir(args[0])
                }
            self.steps.append((name, path_of(args[0]) if isinstance(args[0], int) else args[0]))
            self._after()
            return result

        return call

    def _inode(self, status: os.stat_result) -> Inode:
        return status.st_ino, self._lives.get(status.st_ino, 0)

    def eager(self) -> Tree:
        return {
            str(path.relative_to(self._path)): self._content(path)
            for path in self._path.rglob("*")
            if path.is_file()
        }

    def _content(self, path: Path) -> bytes:
        status = path.stat()
        return self._synced.get(self._inode(status), bytes(status.st_size))

    def lazy(self) -> Tree:
        return dict(self._below(self._inode(self._path.stat()), ""))

    def _below(self, inode: Inode, path: str) -> Iterator[tuple[str, bytes]]:
        for name, child in self._listed.get(inode, {}).items():
            if child in self._listed:
                yield from self._below(child, f"{path}{name}/")
            else:
                yield f"{path}{name}", self._synced.get(child, b"")


def path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")


def read_fd(fd: int) -> bytes:
    return Path(f"/proc/self/fd/{fd}").read_bytes()


def save(tier: DiskTier, number: int) -> None:
    reservation = tier.reserve(key(number), meta(number))
    assert reservation is not None
    result = tier.write(reservation, meta(number), memoryview(content(number)))
    assert tier.settle(reservation, result)


def found_after(tree: Tree, path: Path) -> set[BlockKey]:
    """What a server finds on such a medium; every block that it finds must be right."""
    for name, raw in tree.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(raw)
    tier = DiskTier.open(
        path, fingerprint=FINGERPRINT, block_bytes=BLOCK_BYTES, capacity_bytes=1 << 24
    )
    for held in tier.present():
        into = bytearray(BLOCK_BYTES)
        entry = tier.pin(held)
        assert tier.read(entry, memoryview(into)) == meta(NUMBERS[held])
        assert into == content(NUMBERS[held])
        tier.unpin(entry)
    assert not list(path.rglob(".tmp.*"))
    found = set(tier.present())
    tier.close()
    return found


def test_at_no_instant_does_a_power_cut_leave_a_wrong_block(
    open_disk: OpenDisk, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_disk(6 * RECORD_BYTES + 4096)
    durable: set[BlockKey] = set()  # synced, and not evicted since
    states: dict[str, tuple[Tree, set[BlockKey]]] = {}

    def after() -> None:
        for kind in ("eager", "lazy"):
            tree: Tree = getattr(medium, kind)()
            owed = durable & set(tier.present())
            states.setdefault(f"{kind} {hash(frozenset(tree.items()))} {len(owed)}", (tree, owed))

    medium = Medium(store, after)
    with medium.watched(monkeypatch):
        for number in range(7):  # the last of them evict
            save(tier, number)
            if number in (2, 6):
                tier.sync()
                durable |= set(tier.present())
                after()
    assert tier.usage().evicted_blocks > 0
    assert len(states) > 40
    most = 0
    for number, (tree, owed) in enumerate(states.values()):
        found = found_after(tree, tmp_path / f"state {number}")
        assert owed <= found
        most = max(most, len(owed))
    assert most >= 3


def test_the_content_reaches_the_medium_before_the_name_and_a_flush_brings_the_name(
    open_disk: OpenDisk, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_disk()
    medium = Medium(store, lambda: None)
    with medium.watched(monkeypatch):
        save(tier, 1)
        tier.sync()
    prefix, name = block_name(named(1))
    fingerprint = store / FINGERPRINT.hex()
    steps = [
        (call, str(path).replace(str(store), "DIR"))
        for call, path in medium.steps
        if LEDGER_NAME not in str(path)
    ]
    (temporary,) = {path for call, path in steps if call == "rename"}
    below = f"DIR/{fingerprint.name}"
    assert steps == [
        ("open", temporary),
        ("ftruncate", f"{below}/{temporary}"),
        ("writev", f"{below}/{temporary}"),
        ("fdatasync", f"{below}/{temporary}"),
        ("mkdir", prefix),
        ("rename", temporary),
        ("fsync", f"{below}/{prefix}"),
        ("fsync", below),
        ("fsync", "DIR"),
    ]
    assert (fingerprint / prefix / name).exists()


@pytest.mark.parametrize("case", ["some", "all"])
def test_a_power_cut_after_a_reset_brings_nothing_back(
    case: str,
    open_disk: OpenDisk,
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = open_disk()
    medium = Medium(store, lambda: None)
    with medium.watched(monkeypatch):
        for number in range(3):
            save(tier, number)
        tier.sync()
        if case == "some":
            tier.drop(ONE)
            tier.erase(ONE)
        else:
            tier.drop_all()
            tier.wipe()
        trees = {"eager": medium.eager(), "lazy": medium.lazy()}
    for kind, tree in trees.items():
        left = {key(0), key(2)} if case == "some" else set()
        assert found_after(tree, tmp_path / kind) == left
