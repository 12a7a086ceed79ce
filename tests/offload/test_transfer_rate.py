"""What a load costs, from what loads did cost."""

from __future__ import annotations

import pytest

from offload.transfer_rate import TransferRate


def test_unmeasured_is_none_and_failures_measure_nothing() -> None:
    rate = TransferRate()
    rate.begin(1.0)
    rate.end(9.0, None)
    assert rate.estimate(1) is None


def test_one_load_gives_its_latency() -> None:
    rate = TransferRate()
    rate.begin(1.0)
    rate.end(1.5, 0.25)
    assert rate.estimate(1) == 0.25
    assert rate.estimate(3) == 0.25 + 2 * 0.5


def test_blocks_of_a_burst_share_its_time() -> None:
    rate = TransferRate()
    for _ in range(4):
        rate.begin(0.0)
    for now in (1.0, 1.0, 2.0, 2.0):
        rate.end(now, 1.0)
    assert rate.estimate(5) == 1.0 + 4 * 0.5


def test_a_burst_without_end_is_measured_too() -> None:
    rate = TransferRate()
    rate.begin(0.0)
    for step in range(64):
        rate.begin(float(step))
        rate.end(step + 1.0, 0.5)
    assert rate.estimate(2) == pytest.approx(0.5 + 1.0)


def test_new_measurements_weigh_a_fifth() -> None:
    rate = TransferRate()
    rate.measured(1.0, 1)
    rate.measured(4.0, 2)
    assert rate.estimate(1) == pytest.approx(1.2)
