"""Which loads are drawn, and in which order they are audited."""

from __future__ import annotations

import random

import pytest

from engine import load_samples
from engine.block_chain import hash_at
from engine.load_samples import LoadSamples
from engine.request import Request
from offload.tier import BlockKey
from tests.engine.planning import BLOCK_SIZE, make_request

NUM_BLOCKS = 40


def draw_all(samples: LoadSamples, request: Request, order: list[int] | None = None) -> None:
    for index in order or range(request.num_prompt_tokens // BLOCK_SIZE):
        key = BlockKey(hash_at(request, index, BLOCK_SIZE), 0)
        samples.draw(request, index, key, block_id=100 + index, tier="disk")


def drain(samples: LoadSamples) -> list[int]:
    taken = []
    while batch := samples.take():
        taken += [sample.index for sample in batch]
    return taken


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 1.0])
def test_the_draw_is_one_seeded_sequence(fraction: float) -> None:
    expected = random.Random(7)
    drawn = [index for index in range(NUM_BLOCKS) if expected.random() < fraction]
    for _ in range(2):
        samples = LoadSamples(fraction, 7, BLOCK_SIZE)
        draw_all(samples, make_request(NUM_BLOCKS * BLOCK_SIZE))
        assert len(samples) == len(drawn)
        assert drain(samples) == drawn


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_a_share_is_from_0_to_1(fraction: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        LoadSamples(fraction, 7, BLOCK_SIZE)


def test_a_prefix_comes_before_what_depends_on_it() -> None:
    """In whatever order the loads came; the groups of one position together."""
    samples = LoadSamples(1.0, 7, BLOCK_SIZE)
    request = make_request(3 * BLOCK_SIZE)
    draw_all(samples, request, [2, 0, 1])
    samples.draw(request, 1, BlockKey(hash_at(request, 1, BLOCK_SIZE), 1), 50, "cpu")
    assert [sample.index for sample in samples.take()] == [0]
    assert [(s.index, s.key.group, s.block_id) for s in samples.take()] == [(1, 0, 101), (1, 1, 50)]
    assert [sample.index for sample in samples.take()] == [2]
    assert samples.take() == []


def test_generated_tokens_are_remembered_as_they_stood() -> None:
    samples = LoadSamples(1.0, 7, BLOCK_SIZE)
    request = make_request(list(range(BLOCK_SIZE + 1)))
    request.token_ids += [7, 8, 9]
    samples.draw(request, 1, BlockKey(hash_at(request, 1, BLOCK_SIZE), 0), 5, "disk")
    request.token_ids += [10, 11]
    (sample,) = samples.take()
    assert list(sample.token_ids) == [0, 1, 2, 3, 4, 7, 8, 9]


def test_what_waits_is_bounded_and_what_is_more_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load_samples, "MAX_WAITING", 3)
    samples = LoadSamples(1.0, 7, BLOCK_SIZE)
    draw_all(samples, make_request(5 * BLOCK_SIZE))
    assert (len(samples), samples.num_dropped) == (3, 2)
    assert drain(samples) == [0, 1, 2]
