"""The histogram that `/metrics` renders."""

from __future__ import annotations

from api.histogram import Histogram


def test_buckets_are_cumulative_and_their_bounds_inclusive() -> None:
    histogram = Histogram((1.0, 2.5))
    for value in (0.5, 1.0, 1.1, 2.5, 3.0):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2.0), ("2.5", 4.0), ("+Inf", 5.0)]
    assert histogram.sum == 8.1
    assert histogram.count == 5


def test_one_observation_may_stand_for_several() -> None:
    histogram = Histogram((1.0,))
    histogram.observe(2.0, times=3)
    assert histogram.buckets() == [("1.0", 0.0), ("+Inf", 3.0)]
    assert histogram.sum == 6.0
