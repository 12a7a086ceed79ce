"""Drafts as many as the measured rate is good for."""

from __future__ import annotations

import pytest

from engine.match_trust import ENOUGH, MatchTrust


def test_the_last_draft_is_right_with_enough_probability() -> None:
    for rate in (0.2, 0.3, 0.5, 0.8, 0.9, 0.97):
        trust = MatchTrust([rate])
        count = trust.num_drafts(0, 1000)
        assert rate**count >= ENOUGH > rate ** (count + 1)
    assert [MatchTrust([rate]).num_drafts(0, 31) for rate in (0.1, 0.2, 0.5, 0.9, 0.97, 1.0)] == [
        *(0, 1, 2, 18, 31, 31)
    ]


def test_a_rate_is_measured_and_its_kind_alone() -> None:
    trust = MatchTrust([0.5, 0.5])
    for _ in range(200):
        trust.learn(0, 9, failed=True)
    assert trust.rate(0) == pytest.approx(0.9, abs=0.05)
    assert trust.rate(1) == 0.5


def test_a_request_starts_from_what_others_saw_and_soon_goes_its_own_way() -> None:
    everyone = MatchTrust([0.5])
    for _ in range(200):
        MatchTrust([0.5], parent=everyone).learn(0, 0, failed=True)
    newcomer = MatchTrust([0.5], parent=everyone)
    assert newcomer.rate(0) == everyone.rate(0) < 0.15
    newcomer.learn(0, 31, failed=False)
    assert newcomer.rate(0) > 0.9
    assert everyone.rate(0) < 0.5


def test_what_is_long_past_counts_little() -> None:
    trust = MatchTrust([0.5], parent=MatchTrust([0.5]))
    for _ in range(50):
        trust.learn(0, 31, failed=False)
    assert trust.num_drafts(0, 31) == 31
    for _ in range(40):
        trust.learn(0, 0, failed=True)
    assert trust.num_drafts(0, 31) <= 2
