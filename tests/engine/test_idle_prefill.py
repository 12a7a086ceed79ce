"""Idle time computes what a next turn will want, and nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.async_engine import AsyncEngine
from engine.outputs import FinishReason
from tests.running_engine import Answer, ask, computes_ahead, engine_config, greedy, running_engine

PROMPT = list(range(10, 30))
AHEAD = [*PROMPT, *range(30, 45)]  # 35 tokens: eight blocks of four, and three that are not kept


async def at_rest(engine: AsyncEngine) -> None:
    """Until nothing is computed ahead any more, nor will be."""
    async with asyncio.timeout(30):
        while computes_ahead(engine):
            await asyncio.sleep(0.002)


async def test_what_was_computed_ahead_is_found(tiny_llama: Path, kernel_cache: Path) -> None:
    async with running_engine(tiny_llama, kernel_cache) as engine:
        await ask(engine, PROMPT, greedy(1))
        before = engine.stats()
        engine.prefill_when_idle(lambda: AHEAD, None)
        await at_rest(engine)
        stats = engine.stats()
        assert (stats.idle_prefills, stats.idle_prefill_tokens) == (1, 32 - 20)
        for name in ("finished", "prompt_tokens", "prefix_cache_queries", "prefix_cache_hits"):
            assert getattr(stats, name) == getattr(before, name)
        engine.prefill_when_idle(AHEAD, None)  # all there: nothing to do
        engine.prefill_when_idle(AHEAD, "other")  # another salt: another's tokens
        await at_rest(engine)
        assert engine.stats().idle_prefills == 2
        answer = await ask(engine, [*AHEAD, 7], greedy(4))
        assert answer.cached.device == 32
        alone = await ask(engine, [*AHEAD, 7], greedy(4), cache_salt="alone")
        assert alone.cached.total == 0
        assert answer.token_ids == alone.token_ids


async def test_it_is_stored_like_any_other(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path
) -> None:
    disk = {"cpu_tier": 0, "disk_tier": tmp_path, "disk_tier_size": 64 << 20}
    async with running_engine(tiny_llama, kernel_cache, **disk) as engine:
        engine.prefill_when_idle(AHEAD, None)
        await at_rest(engine)
    async with running_engine(tiny_llama, kernel_cache, load_policy="always", **disk) as engine:
        assert (await ask(engine, [*AHEAD, 7], greedy(1))).cached.disk == 32


async def test_nothing_is_computed_ahead_where_answers_are_not_to_be_stored(
    tiny_llama: Path, kernel_cache: Path
) -> None:
    """What would be computed ahead begins with the answer, as a prompt."""
    settings = {"cpu_tier": 1 << 20, "offload_prompt_only": True}
    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        answer = await ask(engine, PROMPT, greedy(13))
        engine.prefill_when_idle([*PROMPT, *answer.token_ids, 5, 5, 5, 5], None)
        await at_rest(engine)
        await engine.cache_flush()
        num_prompt = len(PROMPT) // engine.config.block_size
        assert engine.cache_stats()["tiers"]["cpu"]["blocks"] == num_prompt
        assert engine.stats().idle_prefills == 0


async def test_a_request_waits_for_one_small_step_at_most(
    tiny_llama: Path, kernel_cache: Path
) -> None:
    async with running_engine(tiny_llama, kernel_cache) as engine:
        core, plain_step = engine._core, engine._core.step
        asked: list[asyncio.Task[Answer]] = []
        steps: list[tuple[int, bool]] = []  # rows of the prefill, and whether anybody waited

        async def step() -> bool:
            live = engine._idle_prefill._live
            before = 0 if live is None else live.num_computed_tokens
            someone = bool(asked)
            did_something = await plain_step()
            if live is not None:
                steps.append((live.num_computed_tokens - before, someone))
                if not asked:
                    asked.append(asyncio.create_task(ask(engine, PROMPT, greedy(4))))
                    await asyncio.sleep(0)
            return did_something

        core.step = step  # type: ignore[method-assign]
        long_one = [11 + n % 300 for n in range(160)]
        engine.prefill_when_idle(long_one, "x")
        await at_rest(engine)
        answer = await asked[0]
        assert answer.finish_reason is FinishReason.LENGTH
        assert steps == [(32, False)]
        stats = engine.stats()
        assert (stats.idle_prefills, stats.idle_prefill_tokens) == (0, 32)
        # What was computed stays.
        assert (await ask(engine, long_one, greedy(1), cache_salt="x")).cached.device == 32


async def test_nothing_is_computed_ahead_while_anybody_runs(
    tiny_llama: Path, kernel_cache: Path
) -> None:
    async with running_engine(tiny_llama, kernel_cache) as engine:
        read = 0

        def ids() -> Sequence[int]:
            nonlocal read
            read += 1
            return AHEAD

        async for output in engine.generate(PROMPT, greedy(12), request_id="1"):
            if output.num_output_tokens == 1:
                for _ in range(20):  # more than are kept
                    engine.prefill_when_idle(ids, None)
            assert read == 0 or engine.stats().num_running == 0
        await at_rest(engine)
        assert read == 16
        assert engine.stats().idle_prefills == 1  # the others found everything there


@pytest.mark.parametrize("what", ["reset", "close"])
async def test_it_ends_with_the_caches_and_the_engine(
    tiny_llama: Path, kernel_cache: Path, what: str
) -> None:
    engine = await AsyncEngine.from_config(engine_config(tiny_llama, kernel_cache))
    for salt in "abc":
        engine.prefill_when_idle([11 + n % 300 for n in range(160)], salt)
    async with asyncio.timeout(30):
        while not engine._idle_prefill.is_live:
            await asyncio.sleep(0)
    if what == "reset":
        await engine.cache_reset()
        await at_rest(engine)
        again = await ask(engine, [11 + n % 300 for n in range(160)], cache_salt="a")
        assert again.cached.total == 0
    await engine.close()
    assert engine.stats().idle_prefills == 0
    engine.prefill_when_idle(AHEAD, None)
    assert not computes_ahead(engine)


async def test_what_cannot_be_computed_costs_nothing(tiny_llama: Path, kernel_cache: Path) -> None:
    def refuse() -> Sequence[int]:
        raise ValueError("the template refused")

    async with running_engine(tiny_llama, kernel_cache) as engine:
        engine.prefill_when_idle(refuse, None)
        engine.prefill_when_idle([], None)
        engine.prefill_when_idle([5] * 3, None)  # not one block
        engine.prefill_when_idle([5] * 100_000, None)
        engine.prefill_when_idle(AHEAD, None)
        await at_rest(engine)
        assert engine.stats().idle_prefills == 1


async def test_a_reset_by_key_takes_what_was_computed_ahead_of_its_next_turn(
    tiny_llama: Path, kernel_cache: Path
) -> None:
    async with running_engine(tiny_llama, kernel_cache, cpu_tier=1 << 20) as engine:
        for key, salt in (("k", None), ("l", "s")):
            await ask(engine, PROMPT, greedy(1), prompt_cache_key=key, cache_salt=salt)
            engine.prefill_when_idle(AHEAD, salt, key)
            await at_rest(engine)
        await engine.cache_flush()
        blocks = {name: tier["blocks"] for name, tier in engine.cache_stats()["tiers"].items()}
        assert blocks == {"device": 16, "cpu": 16}
        dropped = await engine.cache_reset(prompt_cache_key="k")
        assert dropped == {"device": 8, "cpu": 8}
        assert (await ask(engine, [*AHEAD, 7], greedy(1))).cached.total == 0
        assert (await ask(engine, [*AHEAD, 7], greedy(1), cache_salt="s")).cached.device == 32


async def test_a_request_may_have_any_id_while_something_is_computed_ahead(
    tiny_llama: Path, kernel_cache: Path
) -> None:
    async with running_engine(tiny_llama, kernel_cache) as engine:
        engine.prefill_when_idle([11 + n % 300 for n in range(160)], None)
        async with asyncio.timeout(30):
            while not engine._idle_prefill.is_live:
                await asyncio.sleep(0)
        assert engine._idle_prefill._live is not None
        taken = engine._idle_prefill._live.request_id
        engine._stop_idle_prefill()
        answer = await ask(engine, PROMPT, greedy(4), request_id=taken)
        assert answer.finish_reason is FinishReason.LENGTH
