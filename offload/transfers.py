"""What the manager asks of whoever owns the device memory: copies, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from offload.tier import BlockKey


@dataclass(frozen=True, slots=True)
class CopyOut:
    """Copy a device block to every destination, each block_bytes long. The block must hold what
    was offered until then; nothing else needs it afterwards."""

    key: BlockKey
    block_id: int
    destinations: tuple[memoryview, ...]


@dataclass(frozen=True, slots=True)
class CopyIn:
    """Copy `source`, block_bytes long and verified, into a device block."""

    ticket: int
    key: BlockKey
    block_id: int
    source: memoryview


@dataclass(frozen=True, slots=True)
class Transfers:
    """One round. All buffers stay valid until the copies are reported as executed."""

    copies_out: list[CopyOut] = field(default_factory=list)
    copies_in: list[CopyIn] = field(default_factory=list)
    failed_loads: list[int] = field(default_factory=list)  # tickets

    def __bool__(self) -> bool:
        return bool(self.copies_out or self.copies_in or self.failed_loads)
