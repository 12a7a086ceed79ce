"""A view stays what it was while its list grows."""

from __future__ import annotations

import pytest

from engine.token_view import TokenView


def test_a_view_does_not_see_what_is_appended() -> None:
    tokens = [5, 6, 7]
    view = TokenView(tokens)
    tokens += [8, 9]
    assert (len(view), list(view), view[-1], view[:]) == (3, [5, 6, 7], 7, (5, 6, 7))
    assert (view[-2:], view[::-1], view[2:9]) == ((6, 7), (7, 6, 5), (7,))
    assert view == (5, 6, 7) == tuple(view)
    assert view != (5, 6, 7, 8)
    with pytest.raises(IndexError, match="token 3 of 3"):
        view[3]
    with pytest.raises(IndexError, match="token -4 of 3"):
        view[-4]


def test_a_view_may_end_before_its_list() -> None:
    view = TokenView([1, 2, 3], 2)
    assert (list(view), view[-1], 3 in view, view.index(2)) == ([1, 2], 2, False, 1)
    with pytest.raises(ValueError, match="a view of 4 tokens of a list of 3"):
        TokenView([1, 2, 3], 4)
