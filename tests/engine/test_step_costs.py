"""What a pass costs is what was measured, noise and gaps smoothed, old measurements forgotten."""

from __future__ import annotations

import pytest

from engine.step_costs import StepCosts


def test_before_anything_is_measured_more_rows_cost_a_little_more() -> None:
    costs = StepCosts()
    assert costs.seconds(151) / costs.seconds(1) == pytest.approx(2.0, rel=0.01)


def test_between_two_sizes_and_beyond_them_a_straight_line() -> None:
    costs = StepCosts()
    costs.observe(1, 0.030)
    costs.observe(32, 0.061)
    assert costs.seconds(1) == 0.030
    assert costs.seconds(32) == 0.061
    assert costs.seconds(11) == pytest.approx(0.040)
    assert costs.seconds(332) == pytest.approx(0.361)


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


def test_a_size_that_does_not_occur_again_is_forgotten_sooner_if_seldom_measured() -> None:
    costs = StepCosts()
    for _ in range(3):
        costs.observe(32, 9.0)
    costs.observe(64, 99.0)
    for _ in range(98):
        costs.observe(1, 0.030)
    assert (costs.seconds(32), costs.seconds(64)) == (9.0, 99.0)
    for _ in range(2):
        costs.observe(1, 0.030)
    assert costs.seconds(32) == 9.0
    assert costs.seconds(64) < 99.0
    for _ in range(300):
        costs.observe(1, 0.030)
    assert costs.seconds(32) < 1.0


def test_three_measurements_of_as_little_are_enough_to_compare_with() -> None:
    costs = StepCosts()
    known = []
    for size in (8, 8, 9, 8):
        costs.observe(size, 0.03)
        known.append((costs.knows_from(7), costs.knows_from(64)))
    assert known == [(False, False), (False, False), (False, False), (True, True)]


def test_a_first_guess_of_nothing_stays_nothing_until_something_was_measured() -> None:
    costs = StepCosts(first_guess=0.0)
    assert costs.seconds(31) == 0.0
    costs.observe(2, 0.2)
    assert costs.seconds(31) == pytest.approx(0.2 * (1 + 31 / 150) / (1 + 2 / 150))


def test_how_it_grows_is_remembered_when_what_it_was_learnt_from_is_forgotten() -> None:
    costs = StepCosts()
    costs.observe(16, 0.160)  # every row by itself
    for _ in range(200):
        costs.observe(1, 0.010)
    assert costs.seconds(16) == pytest.approx(0.160, rel=0.5)
