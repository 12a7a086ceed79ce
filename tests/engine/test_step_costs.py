"""What a pass costs is what was measured, noise and gaps smoothed, old measurements forgotten."""

from __future__ import annotations

import pytest

from engine.step_costs import StepCosts


def test_before_anything_is_measured_more_rows_cost_a_little_more() -> None:
    costs = StepCosts()
    assert costs.seconds(151) / costs.seconds(1) == pytest.approx(2.0, rel=0.01)


def test_between_two_sizes_a_straight_line_beyond_them_the_first_guess() -> None:
    costs = StepCosts()
    costs.observe(1, 0.030)
    costs.observe(32, 0.061)
    assert costs.seconds(1) == 0.030
    assert costs.seconds(32) == 0.061
    assert costs.seconds(11) == pytest.approx(0.040)
    assert costs.seconds(332) == pytest.approx(0.061 * (1 + 332 / 150) / (1 + 32 / 150))


def test_medians_keep_the_noise_out() -> None:
    costs = StepCosts()
    for seconds in (0.030, 0.031, 0.9, 0.029, 0.5):
        costs.observe(1, seconds)
    assert costs.seconds(1) == 0.031
    for _ in range(9):  # the nine latest count
        costs.observe(1, 0.1)
    assert costs.seconds(1) == 0.1


def test_more_rows_never_seem_cheaper() -> None:
    costs = StepCosts()
    for rows, seconds in ((1, 0.030), (8, 0.050), (8, 0.050), (32, 0.041), (64, 0.060)):
        costs.observe(rows, seconds)
    assert [costs.seconds(rows) for rows in (1, 8, 32, 64)] == pytest.approx(
        [0.030, 0.047, 0.047, 0.060]
    )


def test_a_size_that_does_not_occur_again_is_forgotten() -> None:
    costs = StepCosts()
    costs.observe(32, 9.0)
    for _ in range(1999):
        costs.observe(1, 0.030)
    assert costs.seconds(32) == 9.0
    costs.observe(1, 0.030)
    assert costs.seconds(32) < 0.04
