"""A draft stands iff it and all before it are the target's own draws."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from engine.verification import verify


@dataclass(frozen=True)
class Drawn:
    token_id: int | None


@pytest.mark.parametrize(
    ("drafts", "draws", "stand"),
    [
        ([], [5], [5]),
        ([5], [5, 6], [5, 6]),
        ([5], [4, 6], [4]),
        ([5, 6, 7], [5, 6, 7, 8], [5, 6, 7, 8]),
        ([5, 6, 7], [5, 9, 7, 8], [5, 9]),  # what comes after the first miss does not count
        ([5, 6, 7], [9, 6, 7, 8], [9]),
        ([5, 6, 7], [5, 6, 9, 8], [5, 6, 9]),
        ([5, 6], [5, None, 7], [5, None]),  # a position without a draw accepts nothing
    ],
)
def test_the_draws_that_stand_and_no_others_are_made(
    drafts: list[int], draws: list[int | None], stand: list[int | None]
) -> None:
    asked: list[int] = []

    def draw(num_accepted: int) -> Drawn:
        asked.append(num_accepted)
        return Drawn(draws[num_accepted])

    assert [drawn.token_id for drawn in verify(drafts, draw)] == stand
    assert asked == list(range(len(stand)))
