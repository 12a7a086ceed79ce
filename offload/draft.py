"""A draft: the temporary file that a record is written to before it gets its name.

From creation to the end its writer holds an exclusive lock on it, so that nobody takes it for a
dead writer's; and it is as long from the start as it will become, so that whoever surveys the store
sees what it is going to occupy.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass

# A record may add one block to its two-digit directory and one to the fingerprint's.
_DIRECTORY_UNITS = 2


def charged_bytes(record_bytes: int, unit_bytes: int) -> int:
    """What storing a record may add at most, directories included; files grow by units."""
    return (-(-record_bytes // unit_bytes) + _DIRECTORY_UNITS) * unit_bytes


@dataclass(slots=True)
class Draft:
    """A temporary file being written: created, locked and charged, not yet published."""

    root: int  # descriptor of its directory
    name: str
    fd: int
    charge: int = 0  # bytes; none any more once it is published
    grown: int = 0  # bytes that the directories have gained by it


def create_draft(root: int, name: str, num_bytes: int) -> Draft | None:
    """Create and lock the file; None if a reclaimer saw it before it was locked, and removes it.

    Raises OSError, and leaves nothing.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, 0o600, dir_fd=root)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink:
            os.ftruncate(fd, num_bytes)
            return Draft(root, name, fd)
    except BlockingIOError:
        pass
    except OSError:
        with suppress(OSError):
            os.unlink(name, dir_fd=root)
        os.close(fd)
        raise
    os.close(fd)
    return None
