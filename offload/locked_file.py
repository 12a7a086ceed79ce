"""A small file of a shared directory that is held under a lock."""

from __future__ import annotations

import fcntl
import os


def open_locked(name: str, dir_fd: int, operation: int) -> int:
    """A descriptor of the file `name` behind `dir_fd`, made if there is none, locked by `operation`
    (fcntl.LOCK_SH or LOCK_EX) until it is closed. Raises OSError."""
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=dir_fd)
        try:
            fcntl.flock(fd, operation)
            if os.fstat(fd).st_nlink:  # not deleted while we waited
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
