"""A claim: up to how many bytes a live server may fill side files that lie in a shared directory.

    <fingerprint>.side.claim.<bytes>    0600  empty; whoever may fill so many holds a lock on it

What is claimed counts as occupied at once, and what the files really hold only beyond it, so that
no survey has to come in time for their growth. The lock ends with its process, and the claim with
the lock: what the dead leave counts as it lies.
"""

from __future__ import annotations

import fcntl
import os

from offload.locked_file import open_locked
from offload.store_scan import SIDE_SUFFIX, StoreFile

_CLAIM = f"{SIDE_SUFFIX}.claim."
_MAX_DIGITS = 18


class SideClaim:
    """The claim of this process for its side files; of several processes each may hold one."""

    def __init__(self, fingerprint: str, num_bytes: int) -> None:
        """0 bytes claim nothing."""
        self.num_bytes = num_bytes
        self._name = f"{fingerprint}{_CLAIM}{num_bytes}"
        self._fd: int | None = None

    def hold(self, dir_fd: int) -> None:
        """Claim in the directory behind `dir_fd`, and no longer where it was before. Raises
        OSError, and then nothing has changed."""
        if not self.num_bytes:
            return
        fd = open_locked(self._name, dir_fd, fcntl.LOCK_SH)
        self.close()
        self._fd = fd

    def close(self) -> None:
        """Claim no longer."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class SideClaims:
    """Adds up, in a walk over the store behind `dir_fd`, by how much its side files may grow."""

    def __init__(self, dir_fd: int) -> None:
        self._dir_fd = dir_fd
        self._claimed: dict[str, int] = {}
        self._filled: dict[str, int] = {}

    def add(self, file: StoreFile) -> None:
        """A file of kind SIDE."""
        fingerprint, suffix = file.path[:64], file.path[64:]
        if suffix.startswith(_CLAIM):
            digits = suffix.removeprefix(_CLAIM)
            if digits.isdecimal() and len(digits) <= _MAX_DIGITS and self._is_held(file.path):
                claimed = self._claimed.get(fingerprint, 0)
                self._claimed[fingerprint] = max(claimed, int(digits))
        elif suffix.removeprefix(SIDE_SUFFIX)[:1] in ("", "-"):  # not what was set aside
            filled = self._filled.get(fingerprint, 0)
            self._filled[fingerprint] = filled + file.physical_bytes

    def _is_held(self, name: str) -> bool:
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._dir_fd)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # nobody can tell
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False

    @property
    def growth(self) -> int:
        """Bytes that are claimed and not filled yet."""
        return sum(
            max(0, claimed - self._filled.get(fingerprint, 0))
            for fingerprint, claimed in self._claimed.items()
        )
