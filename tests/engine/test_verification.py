"""A draft stands iff it and all before it are the target's own draws."""

import pytest

from engine.verification import accept


@pytest.mark.parametrize(
    ("drafts", "draws", "accepted"),
    [
        ([], [5], 0),
        ([5], [5, 6], 1),
        ([5], [4, 6], 0),
        ([5, 6, 7], [5, 6, 7, 8], 3),
        ([5, 6, 7], [5, 9, 7, 8], 1),  # what comes after the first miss does not count
        ([5, 6, 7], [9, 6, 7, 8], 0),
        ([5, 6, 7], [5, 6, 9, 8], 2),
        ([5, 6], [5, None, None], 1),  # a position without a draw accepts nothing
    ],
)
def test_accepts_the_longest_agreeing_beginning(drafts, draws, accepted):
    assert accept(drafts, draws) == accepted


@pytest.mark.parametrize("draws", [[], [1, 2], [1, 2, 3, 4]])
def test_refuses_draws_that_do_not_match_the_drafts(draws):
    with pytest.raises(ValueError, match="2 drafts need 3 draws"):
        accept([1, 2], draws)
