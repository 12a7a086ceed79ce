"""The longest match, as a naive search finds it, at a bounded price."""

from __future__ import annotations

import random
import sys
from array import array

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.suffix_index import LONGEST_MATCH, MAX_CANDIDATES, SuffixIndex


def index_of(*sequences: list[int], gram: int = 2) -> SuffixIndex:
    index = SuffixIndex(gram)
    for sequence in sequences:
        index.begin()
        index.extend(sequence)
    return index


def naive_longest(sequences: list[list[int]], suffix: list[int], more_than: int) -> tuple[int, int]:
    """The definition: compare at every position; of equal lengths the last position wins."""
    best, start = (-1, 0), 0
    for sequence in sequences:
        for end in range(1, len(sequence)):  # something must follow
            length = 0
            while (
                length < min(end, len(suffix)) and sequence[end - 1 - length] == suffix[-1 - length]
            ):
                length += 1
            if length > more_than and length >= best[1]:
                best = start + 1 + end, length
        start += 1 + len(sequence)
    return best


TOKENS = st.lists(st.integers(0, 3), max_size=20)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(TOKENS, min_size=1, max_size=3), TOKENS, st.integers(1, 4), st.integers(0, 5))
@example([[1, 2, 3, 0, 2, 3, 1]], [1, 2, 3], 2, 0)  # the longest is not the latest
def test_it_finds_what_a_naive_search_finds(
    sequences: list[list[int]], suffix: list[int], gram: int, more_than: int
) -> None:
    found = index_of(*sequences, gram=gram).longest(array("i", suffix), more_than)
    assert found == naive_longest(sequences, suffix, max(more_than, gram - 1))


@settings(max_examples=60, deadline=None)
@given(TOKENS)
def test_a_text_is_searched_for_its_own_end(tokens: list[int]) -> None:
    index = index_of(tokens)
    assert index.longest(index.last(LONGEST_MATCH)) == naive_longest([tokens], tokens, 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(TOKENS, min_size=2, max_size=4), TOKENS, st.data())
def test_what_is_forgotten_is_not_found_and_positions_stay(
    sequences: list[list[int]], suffix: list[int], data: st.DataObject
) -> None:
    index = index_of(*sequences)
    num_forgotten = data.draw(st.integers(1, len(sequences)))
    for sequence in sequences[:num_forgotten]:
        index.forget_oldest(len(sequence) + 1)
    offset = sum(len(sequence) + 1 for sequence in sequences[:num_forgotten])
    position, length = naive_longest(sequences[num_forgotten:], suffix, 1)
    expected = (position + offset, length) if length else (-1, 0)
    assert index.longest(array("i", suffix)) == expected
    assert len(index) == sum(len(sequence) + 1 for sequence in sequences[num_forgotten:])
    assert all(index.following(position, 3) == [] for position in range(offset))
    index.begin()
    index.extend([7, 8, 9])
    assert index.following(index.end - 1, 3) == [9]
    assert index.longest(array("i", [7, 8])) == (index.end - 1, 2)


@pytest.mark.parametrize("gram", [2, 3, 4, 5])
def test_a_prompt_at_once_is_indexed_as_token_by_token(gram: int) -> None:
    rng = random.Random(gram)
    tokens = [rng.randrange(12) * 4099 for _ in range(1500)]
    at_once, one_by_one, in_pieces = index_of([], gram=gram), index_of([], gram=gram), index_of([])
    in_pieces = index_of([], gram=gram)
    at_once.extend(tokens)
    for token in tokens:
        one_by_one.extend([token])
    for start in range(0, len(tokens), 90):
        in_pieces.extend(tokens[start : start + 90])
    for start in range(0, 1400, 7):
        suffix = array("i", tokens[start : start + rng.randrange(1, 12)])
        found = at_once.longest(suffix)
        assert found == one_by_one.longest(suffix) == in_pieces.longest(suffix)
        if len(suffix) >= gram:
            assert at_once.following(found[0] - found[1], found[1]) == suffix[-found[1] :].tolist()


def test_positions_and_what_follows() -> None:
    index = index_of([5, 6, 7], [5, 6, 8])
    assert (len(index), index.end) == (8, 8)
    assert index.following(1, 2) == [5, 6]
    assert index.following(1, 9) == [5, 6, 7]
    assert index.following(4, 9) == []  # a separator stands there
    assert index.following(6, 9) == [6, 8]
    assert index.following(8, 9) == []
    assert index.last(2).tolist() == [6, 8]
    assert index.last(9).tolist() == [5, 6, 8]


def test_agreement() -> None:
    index = index_of([5, 6, 7, 8])
    suffix = array("i", [1, 6, 7])
    agreements = [index.agreement(position, suffix) for position in range(-1, 7)]
    assert agreements == [0, 0, 0, 0, 0, 2, 0, 0]
    assert index.agreement(4, array("i", [7])) == 1
    assert index.agreement(4, array("i", [4, 5, 6, 7])) == 3  # and the separator equals nothing


def test_a_match_is_followed_no_further_than_the_suffix() -> None:
    index = index_of([1] * 200)
    suffix = index.last(LONGEST_MATCH)
    assert len(suffix) == LONGEST_MATCH
    assert index.longest(suffix) == (index.end - 1, LONGEST_MATCH)


def test_the_number_of_candidates_is_bounded() -> None:
    """Whatever the text, a search compares `MAX_CANDIDATES` places, the newest."""
    long_ago = [1, 2, 3, 4]
    for num_newer, length in ((MAX_CANDIDATES - 1, 4), (MAX_CANDIDATES, 2)):
        index = index_of([*long_ago, 9, *[3, 4, 9] * num_newer])
        assert index.longest(array("i", long_ago))[1] == length


@pytest.mark.parametrize("num_tokens", [100, 1000, 20_000, 70_000])
def test_bytes_per_token(num_tokens: int) -> None:
    rng = random.Random(1)
    index = SuffixIndex(4)
    for _ in range(4):  # with a dead part, as large as it gets
        index.begin()
        index.extend([rng.randrange(50_000) for _ in range(num_tokens // 4 - 1)])
    index.forget_oldest(num_tokens // 4)
    index.forget_oldest(num_tokens // 4)
    num_bytes = sum(sys.getsizeof(value) for value in vars(index).values())
    assert num_bytes / len(index) < 80
