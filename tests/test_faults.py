"""Faults of a tier under a running engine: a shorter hit, never a wrong answer, nobody stuck."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.async_engine import AsyncEngine
from engine.block_chain import hash_at
from engine.block_hash import root_hash
from engine.outputs import FinishReason
from engine.request import Request
from tests.offload.harness import FaultyTier
from tests.running_engine import (
    ask,
    ask_all,
    assert_same_answer,
    evict_device,
    greedy,
    running_engine,
    saves_done,
)

PROMPT = [3 + (17 * i) % 370 for i in range(41)]  # ten blocks and one token
BLOCK_SIZE = 4


@asynccontextmanager
async def engine_with_disk(
    tiny_llama: Path, kernel_cache: Path, store: Path, **overrides: Any
) -> AsyncIterator[AsyncEngine]:
    settings: dict[str, Any] = {"disk_tier": store, "disk_tier_size": 64 << 20, **overrides}
    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        yield engine


def block_files(store: Path) -> list[Path]:
    """Block files in the order they were written, which is that of the chain."""
    return sorted(store.rglob("*.kv"), key=lambda path: path.stat().st_mtime_ns)


@pytest.mark.parametrize("damage", ["truncate", "flip", "vanish"])
async def test_a_bad_block_in_mid_prefix_shortens_the_hit(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path, damage: str
) -> None:
    store = tmp_path / "kv"
    async with engine_with_disk(tiny_llama, kernel_cache, store) as engine:
        expected = await ask(engine, PROMPT, greedy(5))
        await saves_done(engine)
        names = {path.name for path in block_files(store)}
    assert len(names) == 11  # 45 committed positions
    async with engine_with_disk(tiny_llama, kernel_cache, store) as engine:
        block_hash = hash_at(probe(engine, PROMPT), 6, BLOCK_SIZE)
        (victim,) = store.rglob(f"{block_hash.hex()}.*")
        if damage == "truncate":
            victim.write_bytes(victim.read_bytes()[:-100])
        elif damage == "flip":
            content = bytearray(victim.read_bytes())
            content[-100] ^= 4  # of the payload
            (tmp_path / "damaged").write_bytes(content)
            (tmp_path / "damaged").replace(victim)  # never seen half written
        else:
            victim.unlink()
        answer = await ask(engine, PROMPT, greedy(5))
        assert_same_answer(answer, expected)
        assert answer.cached.disk == answer.cached.total == 6 * BLOCK_SIZE
        again = await ask(engine, PROMPT, greedy(5))
        assert_same_answer(again, expected)
        assert again.cached.device == 10 * BLOCK_SIZE
        await saves_done(engine)
    async with engine_with_disk(tiny_llama, kernel_cache, store) as engine:
        assert (await ask(engine, PROMPT, greedy(5))).cached.disk == 10 * BLOCK_SIZE


def probe(engine: AsyncEngine, prompt: list[int]) -> Any:
    """A request that is never scheduled, for its keys."""
    return Request(
        request_id="probe",
        prompt_token_ids=prompt,
        params=greedy(1),
        max_tokens=1,
        stop_ids=frozenset(),
        seed=0,
        root_hash=root_hash(bytes.fromhex(engine.fingerprint)),
        arrival_order=0,
    )


async def test_reads_that_fail_are_misses(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path, disk: list[FaultyTier]
) -> None:
    async with engine_with_disk(tiny_llama, kernel_cache, tmp_path / "kv") as engine:
        expected = await ask(engine, PROMPT)
        await evict_device(engine)
        disk[0].faults["read"] = OSError(errno.EIO, "planted")
        answer = await ask(engine, PROMPT)
        assert_same_answer(answer, expected)
        assert answer.cached.total == 0
        assert engine.stats().tiers["disk"].failed_blocks > 0


async def test_a_hung_read_is_a_miss_at_its_deadline_and_delays_nobody_else(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path, disk: list[FaultyTier]
) -> None:
    async with engine_with_disk(
        tiny_llama, kernel_cache, tmp_path / "kv", load_deadline=1.0
    ) as engine:
        expected = await ask(engine, PROMPT)
        await evict_device(engine)
        disk[0].hanging.add("read")
        stuck = asyncio.create_task(ask(engine, PROMPT))
        await asyncio.sleep(0.05)
        other = await ask(engine, PROMPT[::-1], greedy(4))
        assert other.finish_reason is FinishReason.LENGTH
        assert not stuck.done()  # the other was served while this one waited
        answer = await stuck
        assert_same_answer(answer, expected)
        assert answer.cached.total == 0
        disk[0].release.set()
        disk[0].hanging.clear()


async def test_one_missing_block_is_loaded_once_for_all_who_want_it(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path, disk: list[FaultyTier]
) -> None:
    async with engine_with_disk(tiny_llama, kernel_cache, tmp_path / "kv") as engine:
        expected = await ask(engine, PROMPT)
        await evict_device(engine)
        disk[0].calls.clear()
        answers = await ask_all(engine, [PROMPT] * 3, greedy(8))
        for answer in answers:
            assert_same_answer(answer, expected)
            assert answer.cached.disk == answer.cached.total == 10 * BLOCK_SIZE
        assert disk[0].calls.count("read") == 10


async def test_the_failure_of_one_shared_load_strands_nobody(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path, disk: list[FaultyTier]
) -> None:
    async with engine_with_disk(tiny_llama, kernel_cache, tmp_path / "kv") as engine:
        expected = await ask(engine, PROMPT)
        await evict_device(engine)
        disk[0].faults["read"] = OSError(errno.EIO, "planted")
        for answer in await ask_all(engine, [PROMPT] * 3, greedy(8)):
            assert_same_answer(answer, expected)
            assert answer.cached.disk == 0


async def test_an_abort_while_loading_frees_everything(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path, disk: list[FaultyTier]
) -> None:
    async with engine_with_disk(tiny_llama, kernel_cache, tmp_path / "kv") as engine:
        expected = await ask(engine, PROMPT)
        await evict_device(engine)
        disk[0].hanging.add("read")
        stream = engine.submit(PROMPT, greedy(4), request_id="gone")
        await asyncio.sleep(0.05)
        assert engine.stats().num_waiting == 1
        await engine.abort("gone")
        outputs = [output async for output in stream]
        assert [output.finish_reason for output in outputs] == [FinishReason.ABORT]
        assert engine.stats().kv_cache_usage == 0.0
        disk[0].hanging.clear()
        disk[0].release.set()
        again = await ask(engine, PROMPT)
        assert_same_answer(again, expected)


async def test_a_full_disk_stores_nothing_and_saving_resumes(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path, disk: list[FaultyTier]
) -> None:
    store = tmp_path / "kv"
    async with engine_with_disk(tiny_llama, kernel_cache, store) as engine:
        disk[0].faults["write"] = OSError(errno.ENOSPC, "planted")
        first = await ask(engine, PROMPT)
        await saves_done(engine)
        assert engine.stats().tiers["disk"].blocks == 0
        assert first.finish_reason is FinishReason.LENGTH
        disk[0].faults.clear()
        flushed = await engine.cache_flush()
        assert flushed == {"saved": {"disk": 12}, "failed": {"disk": 0}}
        await ask(engine, PROMPT[::-1])
        await saves_done(engine)
        assert engine.stats().tiers["disk"].blocks == 24
    async with engine_with_disk(tiny_llama, kernel_cache, store) as engine:
        for prompt in (PROMPT, PROMPT[::-1]):
            assert (await ask(engine, prompt)).cached.disk == 10 * BLOCK_SIZE


async def test_closing_saves_what_could_not_be_saved_before(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path, disk: list[FaultyTier]
) -> None:
    store = tmp_path / "kv"
    async with engine_with_disk(tiny_llama, kernel_cache, store) as engine:
        disk[0].faults["write"] = OSError(errno.ENOSPC, "planted")
        await ask(engine, PROMPT)
        await saves_done(engine)
        assert engine.stats().tiers["disk"].blocks == 0
        disk[0].faults.clear()
    async with engine_with_disk(tiny_llama, kernel_cache, store) as engine:
        assert (await ask(engine, PROMPT)).cached.disk == 10 * BLOCK_SIZE


async def test_saves_finish_while_the_engine_is_idle(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path
) -> None:
    async with engine_with_disk(tiny_llama, kernel_cache, tmp_path / "kv") as engine:
        await ask(engine, PROMPT)
        await saves_done(engine)
        assert engine.stats().tiers["disk"].blocks == 12  # 41 + 8 - 1 positions


async def test_a_reset_is_for_ever(tiny_llama: Path, kernel_cache: Path, tmp_path: Path) -> None:
    """Nothing stored, queued or running before it is served again, restart included."""
    store = tmp_path / "kv"
    settings = {"cpu_tier": 1 << 20}
    async with engine_with_disk(tiny_llama, kernel_cache, store, **settings) as engine:
        stored = await ask(engine, PROMPT)
        await saves_done(engine)
        running = asyncio.create_task(ask(engine, PROMPT[::-1], greedy(40)))
        while engine.stats().num_running == 0:
            await asyncio.sleep(0.001)
        dropped = await engine.cache_reset()
        assert dropped["cpu"] >= 12
        assert dropped["disk"] >= 12
        await running
        again = await ask(engine, PROMPT)
        assert_same_answer(again, stored)
        assert again.cached.total == 0
        assert (await ask(engine, [*PROMPT[::-1], 5])).cached.total == 0
        await engine.cache_reset(["device", "cpu", "disk"])
        await saves_done(engine)
    async with engine_with_disk(tiny_llama, kernel_cache, store, **settings) as engine:
        assert (await ask(engine, PROMPT)).cached.total == 0


async def test_load_policies(tiny_llama: Path, kernel_cache: Path, tmp_path: Path) -> None:
    store = tmp_path / "kv"
    async with engine_with_disk(tiny_llama, kernel_cache, store) as engine:
        await ask(engine, PROMPT)
    for policy, disk_tokens, by_choice in [("never", 0, 40), ("always", 40, 0), ("auto", 40, 0)]:
        async with engine_with_disk(tiny_llama, kernel_cache, store, load_policy=policy) as engine:
            answer = await ask(engine, PROMPT)
            assert (answer.cached.disk, answer.recomputed_by_choice) == (disk_tokens, by_choice)


async def test_prompt_only_offload_keeps_generated_blocks_on_the_device(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path
) -> None:
    async with engine_with_disk(
        tiny_llama, kernel_cache, tmp_path / "kv", offload_prompt_only=True
    ) as engine:
        answer = await ask(engine, PROMPT, greedy(20))
        await saves_done(engine)
        assert engine.stats().tiers["disk"].blocks == len(PROMPT) // BLOCK_SIZE
        replay = await ask(engine, [*PROMPT, *answer.token_ids, 9], greedy(1))
        assert replay.cached.device == 60  # 41 + 20 - 1
        await saves_done(engine)
        assert engine.stats().tiers["disk"].blocks == (41 + 20 + 1) // BLOCK_SIZE  # all its prompt
        assert (await engine.cache_flush())["saved"] == {"disk": 0}


async def test_a_flush_does_not_bring_back_what_a_reset_of_the_disk_dropped(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path
) -> None:
    async with engine_with_disk(tiny_llama, kernel_cache, tmp_path / "kv") as engine:
        await ask(engine, PROMPT)
        await saves_done(engine)
        assert (await engine.cache_reset(["disk"]))["disk"] > 0
        await engine.cache_flush()
        assert (await ask(engine, PROMPT)).cached.device == 40  # that tier was not reset
    async with engine_with_disk(tiny_llama, kernel_cache, tmp_path / "kv") as engine:
        assert (await ask(engine, PROMPT)).cached.total == 0


async def test_a_flush_saves_a_loaded_block_that_the_tiers_have_lost(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path
) -> None:
    store = tmp_path / "kv"
    async with engine_with_disk(tiny_llama, kernel_cache, store) as engine:
        await ask(engine, PROMPT, greedy(1))
        await evict_device(engine)
        assert (await ask(engine, PROMPT, greedy(1))).cached.disk == 40
        tier = engine._core.offload._lane("disk").tier
        for key in tier.present():
            entry = tier.pin(key)
            tier.unpin(entry)
            tier.forget(entry)
        assert (await engine.cache_flush())["saved"]["disk"] >= 10


async def test_random_churn_with_failing_tiers_stays_right(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path, disk: list[FaultyTier]
) -> None:
    """Chats whose blocks live in a tiny CPU tier and on a disk that fails half of the time."""
    rng = random.Random(5)
    async with engine_with_disk(
        tiny_llama, kernel_cache, tmp_path / "kv", kv_blocks=40, cpu_tier=64 << 10
    ) as engine:
        histories = [[rng.randrange(3, 380) for _ in range(9)] for _ in range(6)]
        for _ in range(4):
            for verb in ("read", "write"):
                disk[0].faults.pop(verb, None)
                if rng.random() < 0.5:
                    disk[0].faults[verb] = OSError(errno.EIO, "planted")
            warm = await ask_all(engine, histories, greedy(6))
            cold = await ask_all(engine, histories, greedy(6), cache_salt=f"cold-{rng.random()}")
            for one, other in zip(warm, cold, strict=True):
                assert_same_answer(one, other)
                assert other.cached.total == 0
            histories = [
                [*history, *answer.token_ids, rng.randrange(3, 380)]
                for history, answer in zip(histories, warm, strict=True)
            ]
