"""What finished requests left: by salt, bounded over all salts, the oldest first to go."""

from __future__ import annotations

from array import array

from engine.finished_tokens import FinishedTokens


def finished(*requests: tuple[str | None, range], max_tokens: int = 80) -> FinishedTokens:
    tokens = FinishedTokens(max_tokens, gram=2)
    for salt, ids in requests:
        tokens.remember(salt, array("i", ids))
    return tokens


def knows(tokens: FinishedTokens, salt: str | None, *ids: int) -> bool:
    index = tokens.of(salt)
    return index is not None and index.longest(array("i", ids))[1] == len(ids)


def test_salts_share_nothing() -> None:
    tokens = finished((None, range(5)), ("", range(10, 15)), ("a", range(20, 25)))
    assert tokens.salts == {None, "", "a"}
    for salt, first in ((None, 0), ("", 10), ("a", 20)):
        for other in (0, 10, 20):
            assert knows(tokens, salt, other, other + 1) == (other == first)
    assert tokens.of("b") is None


def test_the_bound_is_over_all_salts_and_the_oldest_go_first() -> None:
    # Of 80 positions each request takes 10: nine tokens and one more.
    tokens = finished(*((f"{n}", range(10 * n, 10 * n + 9)) for n in range(8)))
    assert (len(tokens), tokens.salts) == (80, {f"{n}" for n in range(8)})
    tokens.remember("5", array("i", range(100, 104)))
    assert (len(tokens), tokens.salts) == (75, {f"{n}" for n in range(1, 8)})
    tokens.remember("5", array("i", range(110, 114)))
    assert (len(tokens), tokens.salts) == (80, {f"{n}" for n in range(1, 8)})
    for n in range(4):
        tokens.remember("new", array("i", range(200 + 10 * n, 209 + 10 * n)))
    assert tokens.salts == {"5", "6", "7", "new"}
    assert knows(tokens, "5", 50, 51)
    tokens.remember("new", array("i", range(300, 309)))
    assert (len(tokens), tokens.salts) == (80, {"5", "6", "7", "new"})
    assert not knows(tokens, "5", 50, 51)
    assert knows(tokens, "5", 100, 101)


def test_no_request_leaves_more_than_an_eighth() -> None:
    tokens = finished(("a", range(30)))
    assert len(tokens) == 10
    assert not knows(tokens, "a", 20, 21)
    assert knows(tokens, "a", 21, 22)


def test_a_turn_takes_the_place_of_the_one_before() -> None:
    tokens = finished(("chat", range(4)), ("b", range(50, 59)), ("chat", range(8)))
    assert len(tokens) == 9 + 10
    index = tokens.of("chat")
    assert index is not None
    assert index.following(1, 99) == list(range(8))  # in one piece
    # It was used last, so the other one goes first.
    for n in range(7):
        tokens.remember("c", array("i", range(100 + 10 * n, 109 + 10 * n)))
    assert (len(tokens), tokens.salts) == (79, {"chat", "c"})


def test_the_same_request_again_costs_nothing() -> None:
    tokens = finished(("a", range(5)), ("a", range(5)))
    assert len(tokens) == 6


def test_a_request_that_differs_within_is_another_one() -> None:
    tokens = finished(("a", range(4)), ("a", range(1, 7)))
    assert len(tokens) == 5 + 7
    assert knows(tokens, "a", 0, 1, 2)


def test_nothing_is_kept_of_what_can_have_no_match() -> None:
    assert finished(("a", range(2))).salts == set()
    assert len(finished(("a", range(5)), max_tokens=0)) == 0
    assert len(finished(("a", range(3)))) == 4
