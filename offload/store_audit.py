"""Reading a store's records one by one, whoever wrote them: for `overwinter store`."""

from __future__ import annotations

import os

from offload import block_file
from offload.block_file import BlockCorruptError, BlockHeader
from offload.record_io import read_record
from offload.store_scan import OPEN_RECORD, StoreFile, open_directory


def audit(dir_fd: int, file: StoreFile) -> BlockHeader:
    """Read and verify one BLOCK of a scan of `dir_fd`: header, payload, and that the record is
    the one that its name and directory say.

    Raises BlockCorruptError, OSError.
    """
    assert file.fingerprint is not None
    assert file.block is not None
    fd = _open_nofollow(dir_fd, file.path)
    try:
        header_bytes = block_file.declared_header_bytes(os.pread(fd, 16, 0))
        size = os.fstat(fd).st_size
        if size < header_bytes:
            raise BlockCorruptError("size", f"{size} bytes, {header_bytes} of them header")
        payload = memoryview(bytearray(size - header_bytes))
        header = read_record(fd, payload)
    finally:
        os.close(fd)
    fingerprint = bytes.fromhex(file.fingerprint)
    block_file.verify(header, payload, fingerprint=fingerprint, name=file.block)
    return header


def _open_nofollow(dir_fd: int, path: str) -> int:
    """A descriptor for reading, with no symbolic link anywhere on the way."""
    *folders, name = path.split("/")
    current = os.dup(dir_fd)
    try:
        for folder in folders:
            below = open_directory(folder, current)
            os.close(current)
            current = below
        return os.open(name, OPEN_RECORD, dir_fd=current)
    finally:
        os.close(current)
