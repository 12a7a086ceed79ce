"""Weights that are mapped from their files, and giving back their pages once they are packed.

A page that was read once counts as the process's memory for as long as its file is mapped, and the
embedding keeps that mapped.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from pathlib import Path

from torch import Tensor

_SUFFIX = ".safetensors"


class MappedFiles:
    """Where this process has weight files mapped."""

    def __init__(self, maps: Path = Path("/proc/self/maps")) -> None:
        """Reads it off `maps`; where there is none, nothing counts as mapped."""
        self._ranges: list[tuple[int, int]] = []
        try:
            lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return
        for line in lines:
            if line.endswith(_SUFFIX):
                begin, end = (int(part, 16) for part in line.split()[0].split("-"))
                self._ranges.append((begin, end))
        self._madvise = ctypes.CDLL(None).madvise
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def release(self, weight: Tensor) -> None:
        """Drop the pages that lie wholly within `weight`, if it is mapped.

        Its values stay what they are in the file: reading them again maps them again.
        """
        begin = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (weight.data_ptr() + weight.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        index = bisect_right(self._ranges, (begin, float("inf"))) - 1
        if index < 0 or begin >= end or end > self._ranges[index][1]:
            return
        self._madvise(begin, end - begin, mmap.MADV_DONTNEED)
