"""Nobody waits for ever, nothing is lost, nothing leaks: a real engine under the loads that broke
others.

Each test ends with a probe that is served and, through `running_engine`, with every gauge back at
zero; conservation laws are checked after every step.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from engine.outputs import FinishReason
from offload.transfers import Transfers
from tests import drafters
from tests.offload.harness import FaultyTier
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

PROMPT = [3 + (17 * i) % 370 for i in range(41)]  # ten blocks and one token
BLOCK_BYTES = 3 * 2 * 2 * 4 * 16 * 4  # of the tiny model at four tokens a block
PATIENCE = 10  # seconds until a test calls it stuck; each takes a fraction of one


@pytest.fixture
def no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine looks at its tiers when it is woken, and not now and then besides."""
    monkeypatch.setattr("engine.async_engine.OFFLOAD_POLL_SECONDS", 1e6)


def on_disk(path: Path, **overrides: Any) -> dict[str, Any]:
    return {"disk_tier": path / "kv", "disk_tier_size": 64 << 20, **overrides}


def prompts_of(count: int, length: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 380) for _ in range(length)] for _ in range(count)]


# --- an idle engine ---------------------------------------------------------------------------


@pytest.mark.usefixtures("no_polling")
async def test_saves_end_while_the_engine_is_idle_and_a_restart_finds_them(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path
) -> None:
    async with running_engine(tiny_llama, kernel_cache, **on_disk(tmp_path)) as engine:
        first = await ask(engine, PROMPT)
        async with asyncio.timeout(PATIENCE):
            await saves_done(engine)
        assert engine.stats().tiers["disk"].blocks == (len(PROMPT) + 8 - 1) // 4
    async with running_engine(tiny_llama, kernel_cache, **on_disk(tmp_path)) as engine:
        again = await ask(engine, PROMPT)
        assert again.cached.disk == again.cached.total == 40
        assert_same_answer(again, first)


@pytest.mark.usefixtures("no_polling")
async def test_a_failed_load_wakes_an_idle_engine_to_recompute(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path, disk: list[FaultyTier]
) -> None:
    """The one request there is waits for its loads; when they fail nothing else happens."""
    async with running_engine(tiny_llama, kernel_cache, **on_disk(tmp_path)) as engine:
        expected = await ask(engine, PROMPT)
        await evict_device(engine)
        disk[0].faults["read"] = OSError("planted")
        disk[0].hanging.add("read")
        waiting = asyncio.create_task(ask(engine, PROMPT))
        while engine.stats().num_waiting == 0:
            await asyncio.sleep(0.001)
        disk[0].release.set()
        async with asyncio.timeout(PATIENCE):
            answer = await waiting
        assert_same_answer(answer, expected)
        assert answer.cached.total == 0


@pytest.mark.usefixtures("no_polling")
async def test_the_deadline_of_a_load_wakes_an_idle_engine(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path, disk: list[FaultyTier]
) -> None:
    settings = on_disk(tmp_path, load_deadline=0.2)
    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        expected = await ask(engine, PROMPT)
        await evict_device(engine)
        disk[0].hanging.add("read")
        async with asyncio.timeout(PATIENCE):
            answer = await ask(engine, PROMPT)
        assert_same_answer(answer, expected)
        assert answer.cached.total == 0
        disk[0].release.set()
        disk[0].hanging.clear()


async def test_a_waiting_load_does_not_keep_the_head_of_the_queue_out_for_ever(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path, disk: list[FaultyTier]
) -> None:
    """It holds blocks that the next request needs; at its deadline it runs, and ends, without."""
    settings = on_disk(tmp_path, kv_blocks=16, load_deadline=0.3)
    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        expected = await ask(engine, PROMPT, greedy(4))
        await evict_device(engine)
        disk[0].hanging.add("read")
        loading = asyncio.create_task(ask(engine, PROMPT, greedy(4)))
        while engine.stats().num_waiting == 0:
            await asyncio.sleep(0.001)
        head = asyncio.create_task(ask(engine, PROMPT[::-1], greedy(4)))
        async with asyncio.timeout(PATIENCE):
            assert (await head).finish_reason is FinishReason.LENGTH
            assert_same_answer(await loading, expected)
        disk[0].release.set()
        disk[0].hanging.clear()


# --- ways out ---------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["finish", "abort", "preempt", "failed load", "hit but unused"])
async def test_pins_balance_on_every_way_out(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path, disk: list[FaultyTier], way: str
) -> None:
    settings = on_disk(tmp_path, kv_blocks=24, cpu_tier=16 * BLOCK_BYTES, load_deadline=30.0)
    if way == "hit but unused":
        settings["load_policy"] = "never"
    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        expected = await ask(engine, PROMPT)
        await evict_device(engine)
        if way == "finish":
            assert_same_answer(await ask(engine, PROMPT), expected)
        elif way == "abort":
            disk[0].hanging.add("read")
            stream = engine.submit(PROMPT, greedy(4), request_id="gone")
            while engine.stats().num_waiting == 0 or "read" not in disk[0].calls:
                await asyncio.sleep(0.001)
            await engine.abort("gone")
            assert [o.finish_reason async for o in stream] == [FinishReason.ABORT]
            disk[0].hanging.clear()
            disk[0].release.set()
        elif way == "preempt":
            answers = await ask_all(engine, [PROMPT, PROMPT[::-1]], greedy(40))
            assert engine.stats().preemptions > 0
            assert answers[0].token_ids[:8] == expected.token_ids
        elif way == "failed load":
            disk[0].faults["read"] = OSError("planted")
            assert_same_answer(await ask(engine, PROMPT), expected)
            disk[0].faults.clear()
        else:
            answer = await ask(engine, PROMPT)
            assert_same_answer(answer, expected)
            assert answer.recomputed_by_choice == 40
        async with asyncio.timeout(PATIENCE):
            while not engine._core.offload.idle():
                await asyncio.sleep(0.001)
        for lane in engine._core.offload._lanes:
            assert lane.tier.num_pins() == lane.tier.usage().pinned_blocks == 0
        assert engine._core.kv.pool.num_available == 24


# --- accounting -------------------------------------------------------------------------------


async def test_cached_tokens_add_up_over_the_tiers(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path, disk: list[FaultyTier]
) -> None:
    """Of each answer and in the counters; what failed to load was not cached."""
    settings = on_disk(tmp_path, kv_blocks=24, cpu_tier=40 * BLOCK_BYTES)
    prompts = prompts_of(8, 33)
    answers: list[Answer] = []

    async def there_and_back() -> None:
        for prompt in [*prompts, *prompts[::-1]]:
            answers.append(await ask(engine, prompt, greedy(3)))
            await saves_done(engine)

    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        await there_and_back()
        good = engine.stats()
        assert good.tiers["disk"].loaded_blocks * 4 == good.hit_tokens["disk"]
        assert good.tiers["cpu"].loaded_blocks * 4 == good.hit_tokens["cpu"]
        disk[0].faults["read"] = OSError("planted")
        await there_and_back()
        stats = engine.stats()
    assert stats.tiers["disk"].loaded_blocks == good.tiers["disk"].loaded_blocks
    for answer in answers:
        cached = answer.cached
        assert cached.total == cached.device + cached.cpu + cached.disk
        assert cached.total % 4 == 0
    for tier in ("device", "cpu", "disk"):
        total = sum(getattr(answer.cached, tier) for answer in answers)
        assert stats.hit_tokens[tier] == total > 0, tier
    assert stats.hit_tokens["disk"] == good.hit_tokens["disk"]
    assert stats.prefix_cache_hits == stats.hit_tokens["device"]
    assert stats.external_hits == stats.hit_tokens["cpu"] + stats.hit_tokens["disk"]
    assert stats.prompt_tokens == 33 * len(answers)


async def test_a_block_is_never_saved_and_loaded_in_one_round_and_saved_once(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path
) -> None:
    """Requests that lose their blocks come back through the tier that has just got them."""
    settings: dict[str, Any] = {"kv_blocks": 24, "cpu_tier": 256 * BLOCK_BYTES}
    prompts = prompts_of(6, 14)
    async with running_engine(tiny_llama, kernel_cache, kv_blocks=256) as engine:
        truths = await ask_all(engine, prompts, seeded(30))
    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        offload = engine._core.offload
        plain_poll = offload.poll
        rounds: list[Transfers] = []

        def poll() -> Transfers:
            rounds.append(plain_poll())
            return rounds[-1]

        offload.poll = poll  # type: ignore[method-assign]
        for answer, truth in zip(await ask_all(engine, prompts, seeded(30)), truths, strict=True):
            assert_same_answer(answer, truth)
        await saves_done(engine)
        stats = engine.stats()
        assert stats.preemptions > 0
        assert stats.tiers["cpu"].loaded_blocks > 0  # that is how they came back
        assert stats.tiers["cpu"].saved_blocks == stats.tiers["cpu"].blocks
    saved = [copy.key for transfers in rounds for copy in transfers.copies_out]
    assert len(saved) == len(set(saved)) == 6 * ((14 + 30 - 1) // 4)
    for transfers in rounds:
        out = {copy.key for copy in transfers.copies_out}
        assert out.isdisjoint(copy.key for copy in transfers.copies_in)


async def test_nothing_is_hashed_or_published_twice(
    tiny_llama: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What offload adds to a step is work on its new blocks alone, however long the history."""
    num_hashed = num_registered = 0
    from engine import block_chain

    plain_hash = block_chain.block_hash

    def counting_hash(*arguments: Any) -> Any:
        nonlocal num_hashed
        num_hashed += 1
        return plain_hash(*arguments)

    async with running_engine(tiny_llama, kernel_cache, cpu_tier=256 * BLOCK_BYTES) as engine:
        pool = engine._core.kv.pool
        plain_register = pool.register

        def counting_register(*arguments: Any) -> bool:
            nonlocal num_registered
            num_registered += 1
            return plain_register(*arguments)

        pool.register = counting_register  # type: ignore[method-assign]
        monkeypatch.setattr(block_chain, "block_hash", counting_hash)
        await ask(engine, PROMPT, greedy(60))
        num_blocks = (len(PROMPT) + 60 - 1) // 4
        assert (num_hashed, num_registered) == (num_blocks, num_blocks)


# --- loads that broke others ------------------------------------------------------------------


async def test_many_at_once_in_a_small_pool_answer_as_alone(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path
) -> None:
    """64 prompts that share beginnings, three rounds, through a pool that holds a tenth."""
    rng = random.Random(2)
    heads = prompts_of(8, 28)
    prompts = [[*rng.choice(heads), *(rng.randrange(3, 380) for _ in range(8))] for _ in range(64)]
    async with running_engine(tiny_llama, kernel_cache, kv_blocks=1024) as engine:
        truths = [await ask(engine, p, greedy(2), cache_salt=str(n)) for n, p in enumerate(prompts)]
    settings = on_disk(tmp_path, kv_blocks=64, cpu_tier=96 * BLOCK_BYTES)
    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        for _ in range(3):
            for answer, truth in zip(
                await ask_all(engine, prompts, greedy(2)), truths, strict=True
            ):
                assert_same_answer(answer, truth)
        assert engine.stats().external_hits > 0


@pytest.mark.parametrize("apart", [0.0, 0.005, 0.05])
async def test_one_long_prompt_twice_on_a_cold_tier(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path, apart: float
) -> None:
    """The second finds the first's loads pending, arriving or arrived, whichever it is."""
    (prompt,) = prompts_of(1, 161)
    async with running_engine(tiny_llama, kernel_cache, **on_disk(tmp_path)) as engine:
        expected = await ask(engine, prompt, greedy(3))
    settings = on_disk(tmp_path, kv_blocks=128)  # room for both, shared or not
    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        first = asyncio.create_task(ask(engine, prompt, greedy(3)))
        await asyncio.sleep(apart)
        second = await ask(engine, prompt, greedy(3))
        for answer in (await first, second):
            assert_same_answer(answer, expected)
            assert answer.cached.total == 160
        assert engine.stats().tiers["disk"].loaded_blocks == 40


async def test_the_queue_closed_as_a_whole_leaves_a_serving_engine(
    tiny_llama: Path, kernel_cache: Path
) -> None:
    async with running_engine(tiny_llama, kernel_cache, max_num_seqs=2) as engine:
        busy = [engine.submit(PROMPT, greedy(100), request_id=f"busy-{n}") for n in range(2)]
        for stream in busy:
            await anext(stream)
        queued = [
            engine.submit(prompt, greedy(4), request_id=f"queued-{n}")
            for n, prompt in enumerate(prompts_of(50, 9))
        ]
        await asyncio.gather(*(stream.aclose() for stream in [*queued, *busy]))
        async with asyncio.timeout(PATIENCE):
            probe = await ask(engine, PROMPT, greedy(2))
        assert probe.finish_reason is FinishReason.LENGTH
        assert engine.stats().finished["abort"] == 52


async def test_with_drafts_a_prompt_of_many_chunks_is_cached_to_its_end(
    tiny_llama: Path, kernel_cache: Path
) -> None:
    (prompt,) = prompts_of(1, 203)
    async with running_engine(tiny_llama, kernel_cache) as engine:
        truth = await ask(engine, prompt, seeded(9))
    drafters.know(prompt, truth.token_ids)
    replay = [*prompt, *truth.token_ids, 5]
    drafters.CONTINUATIONS.setdefault(tuple(replay), ())
    async with running_engine(
        tiny_llama,
        kernel_cache,
        cpu_tier=256 * BLOCK_BYTES,
        max_num_batched_tokens=16,
        speculative="tests.drafters:RandomAcceptanceDrafter",
    ) as engine:
        answer = await ask(engine, prompt, seeded(9))
        assert_same_answer(answer, truth)
        await saves_done(engine)
        await engine.cache_reset(["device"])
        again = await ask(engine, replay, greedy(0))
        assert again.cached.cpu == again.cached.total == (203 + 9 - 1) // 4 * 4


async def test_a_long_answer_is_reused_to_its_end_after_eviction(
    tiny_llama: Path, kernel_cache: Path
) -> None:
    """The history of a second turn is mostly what the first one generated."""
    settings: dict[str, Any] = {"kv_blocks": 100, "cpu_tier": 256 * BLOCK_BYTES}
    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        answer = await ask(engine, PROMPT, seeded(250))
        await evict_device(engine)
        history = [*PROMPT, *answer.token_ids]
        second = await ask(engine, [*history, 5, 6, 7], greedy(1))
        assert second.cached.cpu == second.cached.total == (len(history) - 1) // 4 * 4 > 250


async def test_a_cpu_tier_of_a_few_blocks_keeps_going(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path
) -> None:
    """Smaller than the device pool and than one prompt: the disk gets everything all the same."""
    settings = on_disk(tmp_path, kv_blocks=40, cpu_tier=3 * BLOCK_BYTES)
    prompts = prompts_of(12, 33)
    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        firsts = await ask_all(engine, prompts, greedy(6))
        async with asyncio.timeout(PATIENCE):
            await saves_done(engine)
        assert engine.stats().tiers["disk"].blocks == 12 * ((33 + 6 - 1) // 4)
        for prompt, first in zip(prompts, firsts, strict=True):
            again = await ask(engine, prompt, greedy(6))
            assert_same_answer(again, first)
            assert again.cached.total == 32
