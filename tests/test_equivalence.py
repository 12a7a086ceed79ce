"""One request, one answer: alone = batched = chunked = preempted = restored = speculated.

In float32, where two runs differ by the order of summation alone. Every run says exactly how many
tokens it had cached, so none of them passes by not exercising what it names.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from engine.sampling_params import SamplingParams
from tests import drafters
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

NUM_REQUESTS = 8


def workload() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 3 to 70 tokens, greedy and sampled, plain and with penalties and filters."""
    rng = random.Random(0)
    kinds = [
        lambda n: greedy(n),
        lambda n: seeded(n, seed=rng.getrandbits(32)),
        lambda n: seeded(n, seed=3, top_k=20, top_p=0.9, min_p=0.01),
        lambda n: seeded(
            n, seed=5, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3
        ),
    ]
    requests = []
    for number in range(NUM_REQUESTS):
        prompt = [rng.randrange(3, 380) for _ in range(rng.choice([3, 9, 16, 33, 70]))]
        requests.append((prompt, kinds[number % len(kinds)](12 + number)))
    return requests


@pytest.fixture(scope="module")
def alone(tiny_llama: Path, kernel_cache: Path) -> list[Answer]:
    """Each request by itself, nothing cached."""

    async def run() -> list[Answer]:
        async with running_engine(tiny_llama, kernel_cache, max_num_batched_tokens=512) as engine:
            answers = []
            for number, (prompt, params) in enumerate(workload()):
                answers.append(await ask(engine, prompt, params, cache_salt=str(number)))
            return answers

    answers = asyncio.run(run())
    for (prompt, _), answer in zip(workload(), answers, strict=True):
        assert answer.cached.total == 0
        drafters.know(prompt, answer.token_ids)
    return answers


def compare(answers: list[Answer], alone: list[Answer]) -> None:
    for answer, expected in zip(answers, alone, strict=True):
        assert_same_answer(answer, expected)


PROMPTS = [prompt for prompt, _ in workload()]
PARAMS = [params for _, params in workload()]


async def test_batched(tiny_llama: Path, kernel_cache: Path, alone: list[Answer]) -> None:
    async with running_engine(tiny_llama, kernel_cache, kv_blocks=256) as engine:
        compare(await ask_all(engine, PROMPTS, PARAMS), alone)


@pytest.mark.parametrize("budget", [8, 24])
async def test_chunked(
    tiny_llama: Path, kernel_cache: Path, alone: list[Answer], budget: int
) -> None:
    """Prompts cut into chunks of a few tokens, mixed with decoding rows in one pass."""
    async with running_engine(
        tiny_llama, kernel_cache, kv_blocks=256, max_num_seqs=8, max_num_batched_tokens=budget
    ) as engine:
        compare(await ask_all(engine, PROMPTS, PARAMS), alone)


async def test_preempted(tiny_llama: Path, kernel_cache: Path, alone: list[Answer]) -> None:
    """A pool that cannot hold them all: requests lose their blocks and come back."""
    async with running_engine(tiny_llama, kernel_cache, kv_blocks=24) as engine:
        compare(await ask_all(engine, PROMPTS, PARAMS), alone)
        assert engine.stats().preemptions > 0


@pytest.mark.parametrize("cpu_tier", [1 << 20, 0])
async def test_restored(
    tiny_llama: Path, kernel_cache: Path, alone: list[Answer], tmp_path: Path, cpu_tier: int
) -> None:
    """From the CPU tier after eviction, and from disk after a restart; from disk alone too."""
    settings = {
        "kv_blocks": 40,
        "cpu_tier": cpu_tier,
        "disk_tier": tmp_path / "kv",
        "disk_tier_size": 64 << 20,
    }
    expected = [(len(prompt) - 1) // 4 * 4 for prompt in PROMPTS]
    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        compare(await ask_all(engine, PROMPTS, PARAMS), alone)
        await evict_device(engine)
        answers = [await ask(engine, p, params) for p, params in zip(PROMPTS, PARAMS, strict=True)]
        compare(answers, alone)
        tier = "cpu" if cpu_tier else "disk"
        restored = [getattr(answer.cached, tier) + answer.cached.device for answer in answers]
        assert restored == expected
        assert sum(answer.cached.device for answer in answers) == 0
        await saves_done(engine)
    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        answers = await ask_all(engine, PROMPTS, PARAMS)
        compare(answers, alone)
        assert [answer.cached.disk for answer in answers] == expected


@pytest.mark.parametrize(
    ("drafter", "accepts"),
    [("AlwaysWrongDrafter", False), ("RandomAcceptanceDrafter", True), ("OracleDrafter", True)],
)
async def test_speculated(
    tiny_llama: Path, kernel_cache: Path, alone: list[Answer], drafter: str, accepts: bool
) -> None:
    async with running_engine(
        tiny_llama,
        kernel_cache,
        kv_blocks=256,
        speculative=f"tests.drafters:{drafter}",
        speculative_tokens=4,
    ) as engine:
        compare(await ask_all(engine, PROMPTS, PARAMS), alone)
        stats = engine.stats()
        assert stats.spec_num_draft_tokens > 50
        assert (stats.spec_num_accepted_tokens > 0) is accepts
        assert stats.drafter_failures == {}
        assert sum(stats.spec_accepted_per_pos) == stats.spec_num_accepted_tokens


@pytest.mark.parametrize("drafter", ["RaisingDrafter", "NonsenseDrafter"])
async def test_a_broken_drafter_costs_its_drafts_alone(
    tiny_llama: Path, kernel_cache: Path, alone: list[Answer], drafter: str
) -> None:
    async with running_engine(
        tiny_llama,
        kernel_cache,
        kv_blocks=256,
        speculative=f"tests.drafters:{drafter}",
        speculative_tokens=4,
    ) as engine:
        compare(await ask_all(engine, PROMPTS, PARAMS), alone)
        stats = engine.stats()
        assert stats.spec_num_accepted_tokens == 0
        assert sum(stats.drafter_failures.values()) > 0


async def test_everything_at_once(
    tiny_llama: Path, kernel_cache: Path, alone: list[Answer], tmp_path: Path
) -> None:
    """Small pool, small chunks, a half-right drafter, both tiers, three rounds of the same."""
    async with running_engine(
        tiny_llama,
        kernel_cache,
        kv_blocks=24,
        max_num_batched_tokens=16,
        cpu_tier=64 << 10,
        disk_tier=tmp_path / "kv",
        disk_tier_size=64 << 20,
        speculative="tests.drafters:RandomAcceptanceDrafter",
    ) as engine:
        for _ in range(3):
            compare(await ask_all(engine, PROMPTS, PARAMS), alone)
        stats = engine.stats()
        assert stats.preemptions > 0
        assert stats.external_hits > 0


async def test_prompt_logprobs_are_the_same_with_a_full_cache(
    tiny_llama: Path, kernel_cache: Path
) -> None:
    """They need every position computed: nothing is taken from the cache, and it says so."""
    prompt = PROMPTS[4]
    params = greedy(2, prompt_logprobs=2)
    async with running_engine(tiny_llama, kernel_cache) as engine:
        cold = await ask(engine, prompt, params, cache_salt="cold")
        await ask(engine, prompt)
        warm = await ask(engine, prompt, params)
        assert warm.cached.total == 0
        assert cold.prompt_logprobs is not None
        assert warm.prompt_logprobs is not None
        assert len(warm.prompt_logprobs) == len(prompt)
        assert warm.prompt_logprobs[0] is None
        for position in range(1, len(prompt)):
            ours, theirs = warm.prompt_logprobs[position], cold.prompt_logprobs[position]
            assert ours is not None
            assert theirs is not None
            assert ours.token_id == prompt[position]
            assert abs(ours.logprob - theirs.logprob) < 1e-4
            assert len(ours.top) == 2
