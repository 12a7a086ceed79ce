"""What became of blocks."""

from __future__ import annotations

import pytest

from offload.history import EVICTED, LOST, RESET, Fate, History
from tests.offload.harness import key

TIERS = ["device", "cpu", "disk"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds since the epoch, one more with every look."""
    now = [100.0]

    def look() -> float:
        now[0] += 1
        return now[0]

    monkeypatch.setattr("offload.history.time.time", look)
    return now


def test_the_latest_fate_in_each_tier_the_latest_first(clock: list[float]) -> None:
    history = History()
    history.note(key(1), "cpu", EVICTED)
    history.note(key(1), "disk", LOST)
    history.note(key(2), "disk", RESET)
    history.note(key(1), "cpu", RESET)
    assert history.fate(key(1), TIERS) == [Fate("cpu", RESET, 104.0), Fate("disk", LOST, 102.0)]
    assert history.fate(key(1), ["disk"]) == [Fate("disk", LOST, 102.0)]
    assert history.fate(key(3), TIERS) == []


def test_the_oldest_is_forgotten_first(clock: list[float]) -> None:
    history = History(max_fates=3)
    for number in range(3):
        history.note(key(number), "cpu", EVICTED)
    history.note(key(0), "cpu", RESET)  # news of the oldest: it is the youngest now
    history.note(key(3), "cpu", EVICTED)
    assert len(history) == 3
    known = [number for number in range(4) if history.fate(key(number), TIERS)]
    assert known == [0, 2, 3]


def test_it_is_bounded_without_being_told() -> None:
    history = History()
    for number in range(70_000):
        history.note(number, "cpu", EVICTED)  # type: ignore[arg-type]
    assert len(history) == 65_536
