"""A real engine with a draft model: the same answers, the same hits, and drafts as good after a hit
of the target's as without."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine.async_engine import AsyncEngine
from engine.draft_model import ModelDrafter
from engine.drafter import DraftContext
from engine.guarded_drafter import GuardedDrafter
from tests.running_engine import (
    Answer,
    ask,
    ask_all,
    assert_same_answer,
    evict_device,
    greedy,
    running_engine,
    saves_done,
    seeded,
)
from tests.tiny_models import make_draft_model, make_tiny_model

BLOCK_SIZE = 4
PROMPT = [3 + (17 * i) % 370 for i in range(42)]  # ten blocks and two tokens
PROMPTS = [PROMPT, PROMPT[5:30], [*PROMPT[:20], *range(100, 117)]]
PARAMS = [greedy(16), seeded(16, presence_penalty=0.5, top_p=0.9, min_tokens=3)]
# A chunk of the draft model's holds a whole prompt: it is asked once and ready.
SETTINGS = {"kv_blocks": 256, "max_num_batched_tokens": 512, "speculative_tokens": 4}


@pytest.fixture(scope="module")
def models(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Draft models of the three-layered target: always right, right now and then, nearly never."""
    folder = tmp_path_factory.mktemp("draft-models")
    return {
        "whole": make_draft_model(tiny_llama, folder / "whole", 3),
        "first layers": make_draft_model(tiny_llama, folder / "first", 2),
        "random": make_tiny_model(folder / "random", seed=9, num_hidden_layers=1),
    }


@pytest.fixture(scope="module")
def plain(tiny_llama: Path, kernel_cache: Path) -> list[list[Answer]]:
    """What the target says to each prompt without drafts, for each of PARAMS."""

    async def run() -> list[list[Answer]]:
        async with running_engine(tiny_llama, kernel_cache, **SETTINGS) as engine:
            return [await ask_all(engine, PROMPTS, params) for params in PARAMS]

    return asyncio.run(run())


def guard_of(engine: AsyncEngine) -> GuardedDrafter:
    speculation = engine._core._speculation
    assert speculation is not None
    return speculation._drafter


def drafter_of(engine: AsyncEngine) -> ModelDrafter:
    drafter = guard_of(engine)._drafter
    assert isinstance(drafter, ModelDrafter)
    return drafter


async def assert_nothing_held(engine: AsyncEngine) -> None:
    """Every request that ended has given back its draft KV."""
    guard = guard_of(engine)
    await guard.propose([DraftContext("after every finish", (), 0, None)])
    drafter = drafter_of(engine)
    drafter.check()
    assert drafter.kv.pool.num_available == drafter.kv.pool.num_blocks
    assert guard.failures == {}


@pytest.mark.parametrize("kind", ["whole", "first layers", "random"])
async def test_answers_are_those_without_drafts(
    tiny_llama: Path,
    kernel_cache: Path,
    models: dict[str, Path],
    plain: list[list[Answer]],
    kind: str,
) -> None:
    settings = {**SETTINGS, "speculative": f"draft:{models[kind]}"}
    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        for params, expected in zip(PARAMS, plain, strict=True):
            answers = await ask_all(engine, PROMPTS, params)
            for actual, theirs in zip(answers, expected, strict=True):
                assert_same_answer(actual, theirs)
        stats = engine.stats()
        assert stats.spec_num_drafts > 0
        all_right = stats.spec_num_accepted_tokens == stats.spec_num_draft_tokens
        assert all_right == (kind == "whole")
        await assert_nothing_held(engine)


async def accepted(engine: AsyncEngine, salt: str, where: str) -> tuple[int, int]:
    """Drafted and accepted tokens of two answers, whose prompts `where` is to hold."""
    before = engine.stats()
    for params in (greedy(12), seeded(12)):
        answer = await ask(engine, PROMPT, params, cache_salt=f"{salt}-{params.seed}")
        held = 0 if where == "nowhere" else getattr(answer.cached, where)
        assert (held, answer.cached.total) == ((0, 0) if where == "nowhere" else (40, 40))
    after = engine.stats()
    return (
        after.spec_num_draft_tokens - before.spec_num_draft_tokens,
        after.spec_num_accepted_tokens - before.spec_num_accepted_tokens,
    )


@pytest.mark.parametrize("kind", ["whole", "first layers"])
async def test_drafts_are_accepted_as_often_after_a_hit_of_the_target(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path, models: dict[str, Path], kind: str
) -> None:
    settings = {
        **SETTINGS,
        "kv_blocks": 64,
        "speculative": f"draft:{models[kind]}",
        "disk_tier": tmp_path / "kv",
    }
    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        cold = await accepted(engine, "a", "nowhere")
        assert await accepted(engine, "a", "device") == cold
        # Nor does it matter whether the draft model's own pages have anything left of it.
        drafter_of(engine).forget(None)
        assert await accepted(engine, "a", "device") == cold
        await evict_device(engine)
        assert await accepted(engine, "a", "disk") == cold
        await saves_done(engine)
    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        assert await accepted(engine, "a", "disk") == cold
    drafted, right = cold
    assert 0 < right < drafted if kind == "first layers" else 0 < right == drafted


async def test_a_replay_hits_all_that_is_certain(
    tiny_llama: Path, kernel_cache: Path, models: dict[str, Path]
) -> None:
    """At each residue of the answer's end, with accepted and rejected drafts before it."""
    settings = {**SETTINGS, "speculative": f"draft:{models['first layers']}"}
    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        for num_tokens in range(5, 9):
            salt = f"residue-{num_tokens}"
            answer = await ask(engine, PROMPT, seeded(num_tokens), cache_salt=salt)
            replay = [*PROMPT, *answer.token_ids, 7, 8]
            again = await ask(engine, replay, greedy(1), cache_salt=salt)
            certain = len(PROMPT) + num_tokens - 1
            assert again.cached.total == certain // BLOCK_SIZE * BLOCK_SIZE


async def test_preempted_requests_are_drafted_for_again(
    tiny_llama: Path, kernel_cache: Path, models: dict[str, Path]
) -> None:
    """The target's pool and the draft model's are both too small for all of them."""
    prompts = [[5 + i, *PROMPT[: 20 + i]] for i in range(5)]
    async with running_engine(tiny_llama, kernel_cache, **SETTINGS) as engine:
        expected = await ask_all(engine, prompts, seeded(16))
    settings = {**SETTINGS, "speculative": f"draft:{models['whole']}", "kv_blocks": 30}
    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        for actual, theirs in zip(
            await ask_all(engine, prompts, seeded(16)), expected, strict=True
        ):
            assert_same_answer(actual, theirs)
        stats = engine.stats()
        assert stats.preemptions > 0
        assert stats.spec_num_accepted_tokens == stats.spec_num_draft_tokens > 0
        await assert_nothing_held(engine)


async def test_kv_memory_holds_as_many_tokens_of_both(
    tiny_llama: Path, kernel_cache: Path, models: dict[str, Path]
) -> None:
    """A block of the target takes three layers, one of its draft model two."""
    layer = 2 * 2 * 16 * BLOCK_SIZE * 4  # keys and values, heads, elements, tokens, bytes
    settings = {
        **SETTINGS,
        "speculative": f"draft:{models['first layers']}",
        "kv_blocks": None,
        "kv_memory": 50 * 5 * layer,
    }
    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        assert engine.stats().num_blocks == 50
        assert drafter_of(engine).kv.pool.num_blocks == 50
        with_draft = engine.fingerprint
    async with running_engine(tiny_llama, kernel_cache) as engine:
        assert engine.fingerprint == with_draft
