"""What the finish step stores: exactly once, exactly up to the committed length, whatever the end.

The tiers are watched from outside, by what they are offered and what they then hold. When a request
is stopped or a pass made to fail, that is decided by the request's state, never by counting steps:
chunk sizes and drafts may change without changing what is asserted here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine.async_engine import AsyncEngine
from engine.block_hash import block_hash, root_hash
from engine.outputs import FinishReason
from engine.request import Request
from engine.sampling_params import SamplingParams
from offload.tier import BlockKey, BlockMeta
from tests import drafters
from tests.running_engine import (
    Answer,
    ask,
    greedy,
    new_text,
    running_engine,
    saves_done,
    seeded,
)

BLOCK_SIZE = 4
PROMPT = [3 + (17 * i) % 370 for i in range(42)]  # ten blocks and two tokens
PATIENCE = 10  # seconds for what takes a few milliseconds
DRAFTERS = ["off", "tests.drafters:AlwaysWrongDrafter", "tests.drafters:RandomAcceptanceDrafter"]


@dataclass
class Watched:
    """An engine and every block its tiers were offered, in order."""

    engine: AsyncEngine
    offers: list[tuple[BlockKey, BlockMeta]] = field(default_factory=list)

    def chain(self, token_ids: Sequence[int], salt: str) -> list[BlockKey]:
        """The keys of the whole blocks of `token_ids`."""
        parent, keys = root_hash(bytes.fromhex(self.engine.fingerprint), salt), []
        for start in range(0, len(token_ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
            parent = block_hash(parent, token_ids[start : start + BLOCK_SIZE])
            keys.append(BlockKey(parent, 0))
        return keys

    async def assert_stored(self, token_ids: Sequence[int], salt: str, num_blocks: int) -> None:
        """The first `num_blocks` blocks were offered once each and lie in the CPU tier; nothing
        else was offered since the last call."""
        keys = self.chain(token_ids, salt)
        assert len(keys) >= num_blocks
        assert [key for key, _ in self.offers] == keys[:num_blocks]
        await saves_done(self.engine)
        tier: Any = self.engine._core.offload._lane("cpu").tier
        held = set(tier.present())
        assert [key in held for key in keys] == [i < num_blocks for i in range(len(keys))]
        self.offers.clear()


@contextlib.asynccontextmanager
async def watched_engine(model: Path, cache_dir: Path, **overrides: Any) -> AsyncIterator[Watched]:
    settings = {"kv_blocks": 256, "cpu_tier": 4 << 20, **overrides}
    async with running_engine(model, cache_dir, **settings) as engine:
        watched = Watched(engine)
        offload = engine._core.offload
        plain_offer = offload.offer

        def offer(key: BlockKey, meta: BlockMeta, block_id: int) -> None:
            watched.offers.append((key, meta))
            plain_offer(key, meta, block_id)

        offload.offer = offer  # type: ignore[method-assign]
        yield watched


def live_request(engine: AsyncEngine, request_id: str) -> Request | None:
    live = engine._core._live.get(request_id)
    return live.request if live is not None else None


async def stopped_when(
    engine: AsyncEngine, condition: Callable[[Request], bool], params: SamplingParams, salt: str
) -> tuple[Answer, int]:
    """Abort as soon as the request's state says so; the answer, and what was confirmed then."""
    core, confirmed = engine._core, -1
    plain_step = core.step

    async def step() -> bool:
        nonlocal confirmed
        did_something = await plain_step()
        request = live_request(engine, "stopped")
        if confirmed < 0 and request is not None and condition(request):
            confirmed = request.num_computed_tokens
            await engine.abort("stopped")
        return did_something

    core.step = step  # type: ignore[method-assign]
    try:
        answer = await ask(engine, PROMPT, params, request_id="stopped", cache_salt=salt)
    finally:
        core.step = plain_step  # type: ignore[method-assign]
    assert answer.finish_reason is FinishReason.ABORT
    return answer, confirmed


@pytest.fixture(scope="module")
def truth(tiny_llama: Path, kernel_cache: Path) -> list[int]:
    """What the model says to PROMPT, known to the drafters from now on."""

    async def run() -> list[int]:
        async with running_engine(tiny_llama, kernel_cache, kv_blocks=256) as engine:
            return (await ask(engine, PROMPT, seeded(24))).token_ids

    token_ids = asyncio.run(run())
    drafters.know(PROMPT, token_ids)
    return token_ids


@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_a_finished_request_is_stored_once_up_to_its_committed_length(
    tiny_llama: Path, kernel_cache: Path, truth: list[int], drafter: str
) -> None:
    """By length, stop id and stop string, one end for every offset into a block."""
    async with watched_engine(
        tiny_llama, kernel_cache, speculative=drafter, speculative_tokens=5
    ) as watched:
        engine = watched.engine
        for count in range(1, 2 * BLOCK_SIZE + 1):
            ends: dict[str, SamplingParams] = {"length": seeded(count)}
            if truth[count - 1] not in truth[: count - 1]:
                ends["stop id"] = seeded(20, stop_token_ids=(truth[count - 1],))
            if piece := new_text(engine, truth, count):
                ends["stop string"] = seeded(20, stop=(piece,))
            for end, params in ends.items():
                salt = f"{end} {count}"
                async with asyncio.timeout(PATIENCE):
                    answer = await ask(engine, PROMPT, params, cache_salt=salt)
                assert answer.token_ids == truth[:count], end
                tokens = PROMPT + answer.token_ids
                await watched.assert_stored(tokens, salt, (len(tokens) - 1) // BLOCK_SIZE)


@pytest.mark.parametrize("num_prompt", [39, 40, 41])
async def test_no_output_stores_the_prompt(
    tiny_llama: Path, kernel_cache: Path, num_prompt: int
) -> None:
    async with watched_engine(tiny_llama, kernel_cache, max_num_batched_tokens=16) as watched:
        answer = await ask(watched.engine, PROMPT[:num_prompt], greedy(0), cache_salt="s")
        assert answer.token_ids == []
        await watched.assert_stored(PROMPT[:num_prompt], "s", num_prompt // BLOCK_SIZE)


@pytest.mark.parametrize("budget", [16, 17, 18, 19])
async def test_aborted_in_mid_prompt_it_is_stored_up_to_its_confirmed_tokens(
    tiny_llama: Path, kernel_cache: Path, budget: int
) -> None:
    async with watched_engine(tiny_llama, kernel_cache, max_num_batched_tokens=budget) as watched:
        answer, confirmed = await stopped_when(
            watched.engine, lambda r: r.num_computed_tokens >= 16, greedy(9), "s"
        )
        assert answer.token_ids == []
        assert 16 <= confirmed < len(PROMPT)
        await watched.assert_stored(PROMPT, "s", confirmed // BLOCK_SIZE)


@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_aborted_while_decoding_it_is_stored_up_to_its_confirmed_tokens(
    tiny_llama: Path, kernel_cache: Path, truth: list[int], drafter: str
) -> None:
    async with watched_engine(
        tiny_llama, kernel_cache, speculative=drafter, speculative_tokens=5
    ) as watched:
        for count in range(1, 2 * BLOCK_SIZE + 1):
            salt = f"abort {count}"

            def reached(request: Request, count: int = count) -> bool:
                return request.num_output_tokens >= count

            answer, confirmed = await stopped_when(watched.engine, reached, seeded(24), salt)
            assert answer.token_ids == truth[: len(answer.token_ids)]
            tokens = PROMPT + answer.token_ids
            assert confirmed == len(tokens) - 1
            await watched.assert_stored(tokens, salt, confirmed // BLOCK_SIZE)


@pytest.mark.parametrize("num_good", [0, 16, 24, 32])
async def test_failed_in_mid_prompt_it_is_stored_no_further_than_it_got(
    tiny_llama: Path, kernel_cache: Path, num_good: int
) -> None:
    """The pass that would go beyond `num_good` positions fails; what it wrote proves nothing."""
    async with watched_engine(
        tiny_llama, kernel_cache, max_num_seqs=8, max_num_batched_tokens=8
    ) as watched:
        runner = watched.engine._core._runner
        plain_forward = runner._forward

        def forward(sequences: Any) -> Any:
            output = plain_forward(sequences)
            if sequences[0].start >= num_good:
                raise RuntimeError("planted")
            return output

        runner._forward = forward  # type: ignore[method-assign]
        answer = await ask(watched.engine, PROMPT, greedy(3), cache_salt="s")
        assert answer.finish_reason is FinishReason.ERROR
        await watched.assert_stored(PROMPT, "s", num_good // BLOCK_SIZE)
        runner._forward = plain_forward  # type: ignore[method-assign]
        again = await ask(watched.engine, PROMPT, greedy(3), cache_salt="s")
        assert again.cached.device == num_good


async def test_finished_in_its_very_first_step(tiny_llama: Path, kernel_cache: Path) -> None:
    """No step before the finish has stored anything."""
    async with watched_engine(tiny_llama, kernel_cache, max_num_batched_tokens=64) as watched:
        answer = await ask(watched.engine, PROMPT, greedy(1), cache_salt="s")
        assert len(answer.token_ids) == answer.num_events == 1
        await watched.assert_stored(PROMPT, "s", len(PROMPT) // BLOCK_SIZE)


async def test_after_preemption_nothing_is_stored_twice_and_nothing_is_missing(
    tiny_llama: Path, kernel_cache: Path
) -> None:
    """Two requests that do not fit together: one goes through its steps twice."""
    async with watched_engine(tiny_llama, kernel_cache, kv_blocks=14) as watched:
        prompts = [PROMPT[:12], PROMPT[12:24]]
        answers = await asyncio.gather(
            *(
                ask(watched.engine, prompt, seeded(24), cache_salt=str(number))
                for number, prompt in enumerate(prompts)
            )
        )
        assert watched.engine.stats().preemptions > 0
        expected = []
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            expected += watched.chain([*prompt, *answer.token_ids][:-1], str(number))
        await saves_done(watched.engine)
        stored = watched.engine.stats().tiers["cpu"]
        assert stored.saved_blocks == stored.blocks == len(expected)
        assert {key for key, _ in watched.offers} == set(expected)


async def test_after_a_failed_load_it_is_stored_as_ever(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path
) -> None:
    """Its first attempt to run ended in a damaged block; the finish does not care."""
    settings = {"disk_tier": tmp_path / "kv", "disk_tier_size": 64 << 20}
    async with watched_engine(tiny_llama, kernel_cache, **settings) as watched:
        await ask(watched.engine, PROMPT, greedy(1), cache_salt="s")
        third = watched.chain(PROMPT, "s")[2]
    (victim,) = (tmp_path / "kv").rglob(f"{third.block_hash.hex()}.*")
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    async with watched_engine(tiny_llama, kernel_cache, **settings) as watched:
        answer = await ask(watched.engine, PROMPT, seeded(7), cache_salt="s")
        assert answer.cached.disk == 2 * BLOCK_SIZE
        tokens = PROMPT + answer.token_ids
        chain = watched.chain(tokens[:-1], "s")
        offered = [key for key, _ in watched.offers]
        assert third in offered
        # Whether blocks behind it had arrived or are computed again is a race; never both.
        assert len(set(offered)) == len(offered)
        assert set(offered) <= set(chain[2:])
        await saves_done(watched.engine)
        disk: Any = watched.engine._core.offload._lane("disk").tier
        assert set(chain) <= set(disk.present())


@pytest.mark.parametrize("prompt_only", [False, True])
@pytest.mark.parametrize("num_prompt", [39, 40, 41])
async def test_prompt_only_stores_whole_blocks_of_the_prompt_alone(
    tiny_llama: Path, kernel_cache: Path, num_prompt: int, prompt_only: bool
) -> None:
    """Beside the default, which stores generated blocks too. The device's cache is the same."""
    async with watched_engine(tiny_llama, kernel_cache, offload_prompt_only=prompt_only) as watched:
        prompt = PROMPT[:num_prompt]
        answer = await ask(watched.engine, prompt, seeded(14), cache_salt="s")
        tokens = prompt + answer.token_ids
        committed = (len(tokens) - 1) // BLOCK_SIZE
        expected = num_prompt // BLOCK_SIZE if prompt_only else committed
        await watched.assert_stored(tokens, "s", expected)
        assert (await watched.engine.cache_flush())["failed"] == {"cpu": 0}
        replay = await ask(watched.engine, [*tokens, 5], greedy(0), cache_salt="s")
        assert replay.cached.device == committed * BLOCK_SIZE


async def test_every_stored_key_names_the_tokens_of_its_place(
    tiny_llama: Path, kernel_cache: Path
) -> None:
    """No skew and no hole: each offer carries its parent and exactly its own tokens."""
    async with watched_engine(tiny_llama, kernel_cache) as watched:
        answer = await ask(watched.engine, PROMPT, seeded(18), cache_salt="s")
        tokens = (PROMPT + answer.token_ids)[:-1]
        parents = [root_hash(bytes.fromhex(watched.engine.fingerprint), "s")]
        parents += [key.block_hash for key in watched.chain(tokens, "s")]
        for index, (key, meta) in enumerate(watched.offers):
            start = index * BLOCK_SIZE
            assert meta.token_ids == tuple(tokens[start : start + BLOCK_SIZE])
            assert meta.parent_hash == parents[index]
            assert key.block_hash == block_hash(meta.parent_hash, meta.token_ids)
        assert len(watched.offers) == len(tokens) // BLOCK_SIZE
