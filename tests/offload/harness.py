"""Small blocks, a planner that executes rounds, a faulty disk."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offload.block_file import BlockName
from offload.manager import OffloadManager
from offload.tier import BlockHash, BlockKey, BlockMeta, Tier
from offload.transfers import Transfers

BLOCK_BYTES = 8192
FINGERPRINT = b"f" * 32
RECORD_BYTES = 4096 + BLOCK_BYTES  # on any file system with 4 KiB blocks


def key(number: int, group: int = 0) -> BlockKey:
    return BlockKey(BlockHash(hashlib.sha256(str(number).encode()).digest()), group)


def root(name: str = "") -> BlockHash:
    return BlockHash(hashlib.sha256(f"root {name}".encode()).digest())


def meta(number: int, chain: str = "") -> BlockMeta:
    tokens = (number, number + 1, number + 2, number + 3)
    return BlockMeta(key(number - 1).block_hash, tokens, root(chain))


def named(number: int) -> BlockName:
    return BlockName(key(number), meta(number).root_tag, meta(number).parent_tag)


def content(number: int) -> bytes:
    """Different for every block, in every page of it."""
    seed = hashlib.sha256(b"content" + str(number).encode()).digest()
    return b"".join(hashlib.sha256(seed + bytes([i])).digest() for i in range(256))[:BLOCK_BYTES]


def physical_bytes(path: Path) -> int:
    """What `du` says, temporaries and directories included."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in (".", *names):
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


class FaultyTier:
    """A real tier whose blocking calls fail, hang or take their time on demand."""

    def __init__(self, inner: Tier) -> None:
        self._inner = inner
        self.faults: dict[str, Exception] = {}
        self.hanging: set[str] = set()
        self.delays: dict[str, float] = {}  # seconds
        self.release = threading.Event()
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _call(self, name: str, *args: Any) -> Any:
        self.calls.append(name)
        if name in self.hanging:
            self.release.wait(30)
        if name in self.delays:
            time.sleep(self.delays[name])
        if name in self.faults:
            raise self.faults[name]
        return getattr(self._inner, name)(*args)

    def write(self, *args: Any) -> Any:
        return self._call("write", *args)

    def read(self, *args: Any) -> Any:
        return self._call("read", *args)

    def read_meta(self, *args: Any) -> Any:
        return self._call("read_meta", *args)

    def wipe(self) -> Any:
        return self._call("wipe")

    def sync(self) -> Any:
        return self._call("sync")


class Planner:
    """Device memory and the task that owns the manager."""

    def __init__(self, *tiers: Any, num_blocks: int = 64, **options: Any) -> None:
        self.woken = threading.Event()
        self.tiers = tiers
        self.device = [bytearray(BLOCK_BYTES) for _ in range(num_blocks)]
        self._held: dict[int, BlockKey] = {}  # what each device block was offered as
        self.loaded: list[int] = []
        self.failed: list[int] = []
        self.manager = OffloadManager(
            tiers, block_bytes=BLOCK_BYTES, wake=self.woken.set, **options
        )

    def commit(self, number: int, block_id: int | None = None) -> BlockKey:
        """Compute block `number` into a device block and offer it. What the block held before is
        withdrawn first, as an evicted one is: a save put off would copy the new content."""
        block_id = number % len(self.device) if block_id is None else block_id
        if self._held.get(block_id, key(number)) != key(number):
            self.manager.withdraw(self._held[block_id])
        self._held[block_id] = key(number)
        self.device[block_id][:] = content(number)
        self.manager.offer(key(number), meta(number), block_id)
        return key(number)

    def execute(self, transfers: Transfers) -> None:
        for out in transfers.copies_out:
            for destination in out.destinations:
                destination[:] = self.device[out.block_id]
        for copy in transfers.copies_in:
            self.device[copy.block_id][:] = copy.source
            self.loaded.append(copy.ticket)
        self.failed += transfers.failed_loads
        self.manager.copied_out(transfers.copies_out)
        self.manager.copied_in(transfers.copies_in)
        self.manager.check()

    def round(self) -> Transfers:
        transfers = self.manager.poll()
        self.execute(transfers)
        return transfers

    async def pump(self) -> None:
        self.round()

    def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        """Play rounds until the condition holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it never happened"
            self.round()
            self.woken.wait(0.002)
            self.woken.clear()

    def settle(self) -> None:
        self.until(self.manager.idle)

    def load(self, number: int, block_id: int = 0, tier: str | None = None) -> bytes | None:
        """Load a block; its bytes on the device, or None if the load failed."""
        self.device[block_id][:] = bytes(BLOCK_BYTES)
        ticket = self.manager.load(key(number), block_id, tier)
        self.until(lambda: ticket in self.loaded or ticket in self.failed)
        return bytes(self.device[block_id]) if ticket in self.loaded else None
