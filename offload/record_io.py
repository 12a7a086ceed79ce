"""Reading and writing one record through a descriptor, in as few calls as the kernel grants."""

from __future__ import annotations

import os

from offload import block_file
from offload.block_file import BlockCorruptError


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


def write_all(fd: int, *parts: bytes | memoryview) -> None:
    """Write the parts one after the other, from where the descriptor stands. Raises OSError."""
    views = [memoryview(part) for part in parts]
    while views:
        views = _advance(views, os.writev(fd, views))


def _advance(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `views` after `count` bytes."""
    while views and count >= len(views[0]):
        count -= len(views[0])
        views = views[1:]
    return [views[0][count:], *views[1:]] if views else []
