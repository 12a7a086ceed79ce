"""Drafts of what followed the longest match; a salt's tokens are its own; trust is measured."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from engine.drafter import DraftContext
from engine.ngram_drafter import NgramDrafter
from engine.token_view import TokenView

LONG = list(range(1000, 1200))


def drafter(max_tokens: int = 31, max_remembered: int = 1 << 16) -> NgramDrafter:
    return NgramDrafter(vocab_size=50_000, max_tokens=max_tokens, max_remembered=max_remembered)


def context(
    tokens: Sequence[int], name: str = "r", max_tokens: int = 31, salt: str | None = None
) -> DraftContext:
    return DraftContext(name, TokenView(list(tokens)), max_tokens, salt)


def leave(ngram: NgramDrafter, tokens: Sequence[int], name: str, salt: str | None = None) -> None:
    ngram.propose([context(tokens[:-1], name, salt=salt)])
    ngram.remember(context(tokens, name, max_tokens=0, salt=salt))
    ngram.finish(name)


def one(ngram: NgramDrafter, *args: object, **kwargs: object) -> list[int]:
    [drafts] = ngram.propose([context(*args, **kwargs)])  # type: ignore[arg-type]
    return drafts


def generate(
    ngram: NgramDrafter, prompt: list[int], output: list[int], name: str = "r", **kwargs: object
) -> list[tuple[int, int]]:
    """(drafted, accepted) of each step of a target that generates `output`."""
    tokens, end, steps = list(prompt), len(prompt) + len(output), []
    truth = prompt + output
    while len(tokens) < end:
        drafts = one(ngram, tokens, name, **kwargs)
        accepted = 0
        for draft, token in zip(drafts, truth[len(tokens) :], strict=False):
            if draft != token:
                break
            accepted += 1
        steps.append((len(drafts), accepted))
        tokens += truth[len(tokens) : len(tokens) + accepted + 1]
    return steps


def test_what_followed_the_longest_match_is_drafted() -> None:
    tokens = [*LONG, 7, *LONG[40:90], 8, 9, *LONG[20:90]]
    assert one(drafter(), tokens) == LONG[90:121]
    assert one(drafter(), tokens, max_tokens=5) == LONG[90:95]
    assert one(drafter(max_tokens=4), tokens) == LONG[90:94]
    assert one(drafter(), tokens, max_tokens=0) == []


def test_nothing_is_drafted_without_a_match_of_two() -> None:
    assert one(drafter(), [1, 2, 3, 4, 2]) == []
    assert one(drafter(), [1]) == []
    assert one(drafter(), []) == []
    assert one(drafter(), [1, 2, 3, 4, 1, 2]) == [3, 4][:2]


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_periodic_text_goes_on_in_circles(period: int) -> None:
    tokens = [5, 6, *(list(range(10, 10 + period)) * 40)[:70]]
    assert one(drafter(), tokens) == [10 + (70 + i) % period for i in range(31)]


def test_contexts_are_drafted_for_each_on_its_own() -> None:
    contexts = [
        context([*LONG, *LONG[:40]], "a"),
        context([1, 2, 3], "b"),
        context([*LONG, *LONG[60:100]], "c", 3),
    ]
    assert drafter().propose(contexts) == [LONG[40:71], [], LONG[100:103]]


def test_what_finished_requests_left_is_drafted_up_to_its_end() -> None:
    ngram = drafter()
    leave(ngram, LONG, "first")
    assert one(ngram, [1, 2, *LONG[30:70]]) == LONG[70:101]
    assert one(ngram, [1, 2, *LONG[150:190]], "s") == LONG[190:]
    assert one(ngram, [1, 2, *LONG[30:33]], "t") == []  # too short for other's tokens


def test_own_tokens_come_before_others_and_newer_before_older() -> None:
    ngram = drafter()
    leave(ngram, [*LONG[:100], 1, 1, 1, 1], "first")
    leave(ngram, [*LONG[:100], 2, 2, 2, 2], "second")
    assert one(ngram, LONG[60:100])[:4] == [2, 2, 2, 2]
    own = [*LONG[70:100], 3, 3, 9, *LONG[70:100], 4, 4, 9, 8, *LONG[70:100]]
    assert one(ngram, own, "own", max_tokens=2) == [4, 4]
    # But the longest match comes before all.
    assert one(ngram, [*own, 9, *LONG[69:100]], "longer")[:4] == [2, 2, 2, 2]


def test_a_salt_never_shows_in_another() -> None:
    ngram = drafter()
    salts = (None, "", "a", "b")
    for n, salt in enumerate(salts):
        leave(ngram, [*LONG[:100], *[n] * 40], f"first-{n}", salt)
    for n, salt in enumerate(salts):
        assert one(ngram, LONG[:100], f"second-{n}", salt=salt) == [n] * 31
    assert one(ngram, LONG[:100], "other", salt="c") == []
    assert one(ngram, LONG[:100], "other", salt="A") == []


def test_live_requests_are_not_shared() -> None:
    ngram = drafter()
    ngram.propose([context(LONG, "live")])
    assert one(ngram, LONG[:100], "other") == []


def test_a_finished_request_leaves_nothing_unless_it_is_remembered() -> None:
    ngram = drafter()
    ngram.propose([context(LONG, "gone")])
    ngram.finish("gone")
    assert one(ngram, LONG[:100], "other") == []
    # The same name is another request.
    assert one(ngram, [*LONG[:40], *range(170), *LONG[30:40]], "gone")[:9] == [*range(9)]


def test_unknown_requests_may_finish_and_be_remembered() -> None:
    ngram = drafter()
    ngram.finish("nobody")
    ngram.remember(context(LONG, "never-asked", max_tokens=0))
    ngram.finish("never-asked")
    ngram.finish("never-asked")
    assert one(ngram, LONG[:50]) == LONG[50:81]


def test_what_is_kept_is_bounded() -> None:
    ngram = drafter(max_remembered=808)
    for n in range(9):  # each leaves an eighth
        leave(ngram, range(100 * n, 100 * n + 100), f"{n}")
    assert one(ngram, list(range(50)), "a") == []
    assert one(ngram, list(range(100, 150)), "b") == list(range(150, 181))
    for request in ("a", "b"):
        ngram.finish(request)
    assert (len(ngram._requests), len(ngram._finished)) == (0, 808)
    without = drafter(max_remembered=0)
    leave(without, LONG, "first")
    assert one(without, LONG[:50]) == []


def test_asked_rarely_it_finds_the_same() -> None:
    rng = random.Random(3)
    tokens = [rng.randrange(6) for _ in range(900)]
    often, rarely = drafter(), drafter()
    for end in range(700, 900):
        one(often, tokens[:end])
        if end % 67 == 0:
            request = rarely._request("r")
            one(rarely, tokens[:end])
            assert [g.tokens for g in request.guesses] == [
                g.tokens for g in often._request("r").guesses
            ]


def test_the_same_calls_get_the_same_drafts() -> None:
    rng = random.Random(4)
    text = [rng.randrange(40) for _ in range(600)]
    runs = []
    for _ in range(2):
        ngram = drafter()
        steps = [generate(ngram, text, text[50:300], "a")]
        ngram.remember(context([*text, *text[50:300]], "a"))
        ngram.finish("a")
        steps.append(generate(ngram, text[:100], text[100:400], "b"))
        runs.append(steps)
    assert runs[0] == runs[1]


def test_a_copy_is_at_full_length_after_three_steps() -> None:
    steps = generate(drafter(), [*LONG, 1, 2, LONG[0], LONG[1]], LONG[2:])
    assert [accepted for _, accepted in steps[3:5]] == [31, 31]
    assert len(steps) <= 9
    assert all(drafted == accepted for drafted, accepted in steps[:-1])


def test_useless_matches_are_soon_given_few_drafts() -> None:
    """Pairs that repeat and never go on alike: two match, what follows is always another."""
    tokens = [token for n in range(200) for token in (1, 2, 1000 + n, 3000 + n)]
    drafted = [count for count, _ in generate(drafter(), tokens[:80], tokens[80:])]
    assert len(drafted) == 720  # nothing was ever right
    assert 0 < sum(drafted[:40]) < 10
    assert sum(drafted[40:]) == 0


def test_drafts_that_were_never_made_are_learnt_from_too() -> None:
    """No drafts, so nothing is ever accepted; yet what would have stood is seen."""
    ngram = drafter()
    tokens = [token for n in range(100) for token in (1, 2, 1000 + n)]
    for end in range(10, 300):
        assert one(ngram, tokens[:end], max_tokens=0) == []
    copy = [*tokens, *LONG]
    ngram.propose([context(copy)])
    for end in range(2, 60):
        one(ngram, [*copy, *LONG[:end]], max_tokens=0)
    assert len(one(ngram, [*copy, *LONG[:60]])) == 31


@pytest.mark.parametrize(
    ("edited", "rest"),
    [
        ([*LONG[:100], 5], LONG[101:]),  # another token in place of one
        ([*LONG[:100], 5, LONG[100]], LONG[101:]),  # one put in, and one token to tell
        ([*LONG[:100], LONG[103]], LONG[104:]),  # three left out
    ],
)
def test_an_edited_text_goes_on_at_once(edited: list[int], rest: list[int]) -> None:
    ngram = drafter()
    one(ngram, [*LONG, *edited[:60]])
    one(ngram, [*LONG, *edited[:91]])
    one(ngram, [*LONG, *edited[:101]])
    drafts = one(ngram, [*LONG, *edited])
    assert len(drafts) >= 3
    assert drafts == rest[: len(drafts)]


@pytest.mark.parametrize(("num_other", "expected"), [(32, LONG[122:125]), (33, [])])
def test_a_trail_gets_cold(num_other: int, expected: list[int]) -> None:
    ngram = drafter()
    one(ngram, [*LONG, *LONG[:60]])
    one(ngram, [*LONG, *LONG[:90]])
    assert one(ngram, [*LONG, *LONG[:90], *range(num_other)]) == expected


def test_a_long_prompt_is_indexed_over_several_calls_and_starves_nobody() -> None:
    ngram = drafter()
    prompt = [*[1, 2] * 19_000, *LONG, *LONG[:50]]
    contexts = [context(prompt, "long"), context([*LONG, *LONG[:40]], "short")]
    for expected in ([], [], [1050 + n for n in range(31)]):
        assert ngram.propose([contexts[0]]) == [expected]
    assert ngram._request("long").num_tokens == len(prompt)
    other = drafter()
    one(other, LONG, "short")
    assert other.propose(contexts) == [[], LONG[40:71]]


def test_others_text_that_is_forgotten_meanwhile_is_not_followed() -> None:
    ngram = drafter(max_remembered=1608)
    leave(ngram, LONG, "first")
    assert one(ngram, LONG[:60]) == LONG[60:91]
    for n in range(8):
        leave(ngram, range(5000 + 200 * n, 5200 + 200 * n), f"{n}")
    assert one(ngram, [*LONG[:70], 5]) == []


def test_how_likely_its_drafts_are_is_what_such_matches_have_shown() -> None:
    ngram = drafter()
    assert one(ngram, [1, 2, 3]) == []
    assert ngram.likelihoods() == [0.0]
    ngram.propose([context([1, 2, 3], "none"), context([*LONG[:60], *LONG[20:40]], "long")])
    nothing, at_first = ngram.likelihoods()
    assert nothing == 0.0
    assert 0.9 < at_first < 1.0
    generate(ngram, [*LONG, *LONG[:18]], LONG[18:60], "copied")
    ngram.propose([context([*LONG[:60], *LONG[20:40]], "later")])
    assert at_first < ngram.likelihoods()[0] < 1.0
