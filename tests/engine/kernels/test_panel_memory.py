"""Packed weights lie apart, in memory of their own that asks for large pages and is given back."""

from __future__ import annotations

import itertools
import mmap
from pathlib import Path

import pytest

from engine.kernels import panel_memory
from engine.kernels.panel_memory import ALIGNMENT, MAPPING, PAGE, PanelMemory


def mapping_of(address: int) -> str:
    """Its line in the process's table; empty where nothing is mapped."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return line
    return ""


def test_places_are_zeros_that_nobody_shares() -> None:
    memory = PanelMemory()
    sizes = [0, 1, ALIGNMENT, 100, MAPPING, MAPPING - 64, 200, MAPPING + 1, 300]
    places = [memory(size) for size in sizes]
    assert [place.numel() for place in places] == sizes
    for place in places:
        assert place.data_ptr() % ALIGNMENT == 0
        assert not place.any()
    spans = sorted((place.data_ptr(), place.data_ptr() + place.numel()) for place in places)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_a_mapping_lives_as_long_as_what_is_in_it() -> None:
    memory = PanelMemory()
    first, second = memory(5000), memory(5000)
    first.fill_(7)
    address = first.data_ptr()
    del memory, second
    assert first.tolist() == [7] * 5000
    assert mapping_of(address)
    del first
    assert not mapping_of(address)


def test_large_pages_are_asked_for_where_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    plain = panel_memory._advise

    def advise(mapping: mmap.mmap) -> None:
        plain(mapping)
        asked.append(len(mapping))

    monkeypatch.setattr(panel_memory, "_advise", advise)
    memory = PanelMemory()
    small = [memory(1000) for _ in range(3)]
    large = memory(MAPPING + 1)
    assert asked == [MAPPING + PAGE, MAPPING + 2 * PAGE]
    for place in (small[0], large):
        assert place.data_ptr() % PAGE == 0
        assert mapping_of(place.data_ptr()).split()[1] == "rw-p"  # shared memory has none
