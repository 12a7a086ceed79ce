"""Bounded buffers between the device and a tier that is not memory."""

from __future__ import annotations

import mmap


class Staging:
    """Equal buffers in one anonymous mapping, handed out and given back by the planner.

    A quarter, at least one, is kept back for loads: saves can wait, somebody waits for a load.
    A buffer in a hung call stays out until the call returns, so a hung disk costs this much
    memory and no more.
    """

    def __init__(self, staging_bytes: int, block_bytes: int) -> None:
        self.num_buffers = max(2, staging_bytes // block_bytes)
        self._block_bytes = block_bytes
        self._kept_for_loads = max(1, self.num_buffers // 4)
        self._arena = mmap.mmap(
            -1, self.num_buffers * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        self._free = list(range(self.num_buffers - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take_for_load(self) -> int | None:
        """A buffer's number, or None when all are out."""
        return self._free.pop() if self._free else None

    def take_for_save(self) -> int | None:
        """A buffer's number, or None when the rest is kept for loads."""
        return self._free.pop() if len(self._free) > self._kept_for_loads else None

    def give_back(self, buffer: int) -> None:
        if buffer in self._free:
            raise ValueError("a buffer given back twice")
        self._free.append(buffer)

    def view(self, buffer: int) -> memoryview:
        """The buffer's memory, block_bytes long."""
        start = buffer * self._block_bytes
        return memoryview(self._arena)[start : start + self._block_bytes]
