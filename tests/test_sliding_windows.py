"""Sliding windows through the whole engine: Gemma-like layers, every tier, exact hits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running_engine import (
    Answer,
    ask,
    ask_all,
    assert_same_answer,
    evict_device,
    greedy,
    running_engine,
    saves_done,
)
from tests.tiny_models import make_tiny_model

WINDOW = 24
BLOCK_SIZE = 4
NUM_GROUPS = 3  # two of windows and one full, one layer each
PROMPT = [3 + (17 * i) % 370 for i in range(130)]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("gemma"), "gemma3_text")


async def test_a_hit_from_every_tier_equals_a_cold_run(
    gemma: Path, kernel_cache: Path, tmp_path: Path
) -> None:
    settings = {"kv_blocks": 160, "cpu_tier": 4 << 20, "disk_tier": tmp_path / "kv"}
    prompts = [PROMPT[:length] for length in (23, 24, 25, 49, 72, 97, 130)]
    cold: list[Answer] = []
    async with running_engine(gemma, kernel_cache, **settings) as engine:
        for number, prompt in enumerate(prompts):
            cold.append(await ask(engine, prompt, greedy(7), cache_salt=f"cold-{number}"))
            assert_same_answer(await ask(engine, prompt, greedy(7)), cold[-1])
        await evict_device(engine)
        for prompt, expected in zip(prompts, cold, strict=True):
            answer = await ask(engine, prompt, greedy(7))
            assert_same_answer(answer, expected)
            assert answer.cached.total == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
            assert answer.cached.disk == 0
        await saves_done(engine)
    async with running_engine(gemma, kernel_cache, **settings) as engine:
        for prompt, expected in zip(prompts, cold, strict=True):
            turn = [*prompt, *expected.token_ids, 5, 6, 7]
            answer = await ask(engine, turn, greedy(3))
            assert answer.cached.total == (len(prompt) + 6) // BLOCK_SIZE * BLOCK_SIZE
            afresh = await ask(engine, turn, greedy(3), cache_salt=f"afresh-{len(turn)}")
            assert afresh.cached.total == 0
            assert_same_answer(answer, afresh)


async def test_windows_hold_their_span_and_no_more(gemma: Path, kernel_cache: Path) -> None:
    """130 + 20 positions: 38 blocks of the full group, 8 at most of each window, where without
    groups every layer would hold 38."""
    async with running_engine(gemma, kernel_cache, kv_blocks=120) as engine:
        stream = engine.submit(PROMPT, greedy(20), request_id="held")
        most = 0
        async for _ in stream:
            pool = engine._core.kv.pool
            most = max(most, pool.num_blocks - pool.num_available)
        assert most == 38 + 2 * 7
    async with running_engine(gemma, kernel_cache, kv_blocks=56) as engine:
        assert engine.max_request_tokens == (56 - 2 * 8) * BLOCK_SIZE


async def test_many_at_once_through_a_small_pool(gemma: Path, kernel_cache: Path) -> None:
    """Preempted, chunked and sharing prefixes, with drafts that are always wrong."""
    prompts = [[*PROMPT[: 40 + 7 * n], n + 3] for n in range(6)]
    async with running_engine(gemma, kernel_cache, kv_blocks=400) as engine:
        alone = [
            await ask(engine, prompt, greedy(24), cache_salt=str(number))
            for number, prompt in enumerate(prompts)
        ]
    async with running_engine(
        gemma,
        kernel_cache,
        kv_blocks=70,
        cpu_tier=1 << 20,
        max_num_batched_tokens=16,
        speculative="tests.drafters:AlwaysWrongDrafter",
    ) as engine:
        for _ in range(2):
            answers = await ask_all(engine, prompts, greedy(24))
            for answer, expected in zip(answers, alone, strict=True):
                assert_same_answer(answer, expected)
        assert engine.stats().preemptions > 0
