"""The bug this project was born from, at every residue, for every way to finish.

A prompt of `NUM_PROMPT` tokens and m generated ones end at every offset into a block. Replaying all
of them plus a tail must hit exactly the committed length rounded down to blocks, never the last
token's slot and never less, and must give the logprobs of a run that cached nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from engine.async_engine import AsyncEngine
from engine.outputs import FinishReason
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
    seeded,
)

BLOCK_SIZE = 16
NUM_PROMPT = 21
RESIDUES = range(1, 2 * BLOCK_SIZE + 1)
TAIL = [5, 6, 7]
DRAFTERS = [
    "off",
    "ngram",
    "tests.drafters:AlwaysWrongDrafter",
    "tests.drafters:RandomAcceptanceDrafter",
]


def prompt_of(number: int) -> list[int]:
    """A prompt that shares its first token with no other."""
    return [3 + number] + [(11 * number + 7 * i) % 300 + 40 for i in range(NUM_PROMPT - 1)]


def committed_blocks(num_tokens: int) -> int:
    return (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


async def truths(engine: AsyncEngine) -> list[Answer]:
    """The answers that no cache or drafter has touched; `test_equivalence` proves that being
    batched changes nothing."""
    prompts = [prompt_of(number) for number in RESIDUES]
    return await ask_all(engine, prompts, seeded(2 * BLOCK_SIZE + 4))


@pytest.fixture(scope="module")
def reference(tiny_llama: Path, kernel_cache: Path) -> list[Answer]:
    async def run() -> list[Answer]:
        async with running_engine(
            tiny_llama, kernel_cache, block_size=BLOCK_SIZE, kv_blocks=256
        ) as engine:
            return await truths(engine)

    answers = asyncio.run(run())
    for number, answer in zip(RESIDUES, answers, strict=True):
        drafters.know(prompt_of(number), answer.token_ids)
    return answers


def first_occurrence(answer: Answer, count: int) -> bool:
    return answer.token_ids[count - 1] not in answer.token_ids[: count - 1]


async def check_replay(engine: AsyncEngine, history: list[int], expected_cached: int) -> None:
    """Replay `history` and a tail: exact hit, and the answer of a run that hits nothing."""
    prompt = [*history, *TAIL]
    replay = await ask(engine, prompt, greedy(3))
    cold = await ask(engine, prompt, greedy(3), cache_salt=f"cold-{len(history)}-{history[0]}")
    assert cold.cached.total == 0
    assert replay.cached.total == expected_cached
    assert_same_answer(replay, cold)


def salted_params(length: int, **fields: object) -> SamplingParams:
    return replace(seeded(length), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("ending", ["length", "stop_id"])
async def test_every_residue(
    tiny_llama: Path,
    kernel_cache: Path,
    reference: list[Answer],
    drafter: str,
    ending: str,
) -> None:
    async with running_engine(
        tiny_llama, kernel_cache, block_size=BLOCK_SIZE, speculative=drafter, speculative_tokens=5
    ) as engine:
        for number, truth in zip(RESIDUES, reference, strict=True):
            num_output = number
            if ending == "length":
                params = seeded(num_output)
            else:
                while not first_occurrence(truth, num_output):
                    num_output += 1
                last = truth.token_ids[num_output - 1]
                params = salted_params(num_output + 4, stop_token_ids=(last,))
            answer = await ask(engine, prompt_of(number), params)
            assert answer.token_ids == truth.token_ids[:num_output]
            assert answer.finish_reason == ("length" if ending == "length" else "stop")
            expected = committed_blocks(NUM_PROMPT + num_output)
            await check_replay(engine, prompt_of(number) + answer.token_ids, expected)
        stats = engine.stats()
        if drafter != "off":
            # The n-gram drafter has drafts where a replay says again what was said before.
            assert stats.spec_num_draft_tokens > (20 if drafter == "ngram" else 100)
            accepted = stats.spec_num_accepted_tokens
            assert (accepted == 0) == ("AlwaysWrong" in drafter)


@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_every_residue_aborted(
    tiny_llama: Path, kernel_cache: Path, reference: list[Answer], drafter: str
) -> None:
    """An abort keeps what was confirmed when it took effect: all but the last token."""
    async with running_engine(
        tiny_llama, kernel_cache, block_size=BLOCK_SIZE, speculative=drafter, speculative_tokens=5
    ) as engine:
        for number, truth in zip(RESIDUES, reference, strict=True):
            request_id = f"abort-{number}"
            answer = Answer()
            async for output in engine.generate(
                prompt_of(number), seeded(2 * BLOCK_SIZE + 4), request_id=request_id
            ):
                answer.add(output)
                if len(answer.token_ids) >= number and output.finish_reason is None:
                    await engine.abort(request_id)
            assert answer.finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
            assert answer.token_ids == truth.token_ids[: len(answer.token_ids)]
            expected = committed_blocks(NUM_PROMPT + len(answer.token_ids))
            await check_replay(engine, prompt_of(number) + answer.token_ids, expected)


async def test_every_residue_failed(
    tiny_llama: Path, kernel_cache: Path, reference: list[Answer]
) -> None:
    """A pass that fails confirms nothing: its request keeps what came before it."""
    async with running_engine(tiny_llama, kernel_cache, block_size=BLOCK_SIZE) as engine:
        runner = engine._core._runner
        plain_forward = runner._forward
        for number, truth in zip(RESIDUES, reference, strict=True):
            passes_left = number

            def failing_forward(sequences):  # type: ignore[no-untyped-def]
                nonlocal passes_left
                if passes_left == 0:
                    raise RuntimeError("planted")
                passes_left -= 1
                return plain_forward(sequences)

            runner._forward = failing_forward  # type: ignore[method-assign]
            answer = await ask(engine, prompt_of(number), seeded(2 * BLOCK_SIZE + 4))
            runner._forward = plain_forward  # type: ignore[method-assign]
            assert answer.finish_reason is FinishReason.ERROR
            assert answer.error == "the forward pass failed: planted"
            assert answer.token_ids == truth.token_ids[:number]
            expected = committed_blocks(NUM_PROMPT + number)
            await check_replay(engine, prompt_of(number) + answer.token_ids, expected)


@pytest.mark.parametrize("tier", ["cpu", "disk"])
@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_every_residue_from_each_tier(
    tiny_llama: Path,
    kernel_cache: Path,
    reference: list[Answer],
    drafter: str,
    tier: str,
    tmp_path: Path,
) -> None:
    """The same from the CPU tier, from disk when the CPU tier has lost it too (the first half, each
    offset once), and from disk after a restart (the second); drafts are made in the replays too."""
    settings = {
        "block_size": BLOCK_SIZE,
        "kv_blocks": 16,
        "cpu_tier": 64 << 20 if tier == "cpu" else 96 << 10,  # or 8 blocks
        "disk_tier": tmp_path / "kv",
        "disk_tier_size": 256 << 20,
    }
    drafting = {"speculative": drafter, "speculative_tokens": 5}

    async def check(engine: AsyncEngine, histories: list[list[int]]) -> None:
        for history in histories:
            expected = committed_blocks(len(history))
            prompt = [*history, *TAIL]
            drafters.CONTINUATIONS.setdefault(tuple(prompt), ())
            cold = await ask(engine, prompt, greedy(3), cache_salt="cold")
            assert cold.cached.total == 0
            drafters.know(prompt, cold.token_ids)
            replay = await ask(engine, prompt, greedy(3))
            assert replay.cached.total == getattr(replay.cached, tier) == expected
            assert_same_answer(replay, cold)

    async with running_engine(tiny_llama, kernel_cache, **settings, **drafting) as engine:
        histories = []
        for number, truth in zip(RESIDUES, reference, strict=True):
            answer = await ask(engine, prompt_of(number), seeded(number))
            assert answer.token_ids == truth.token_ids[:number]
            histories.append(prompt_of(number) + answer.token_ids)
        await evict_device(engine)
        at_once = histories if tier == "cpu" else histories[:BLOCK_SIZE]
        await check(engine, at_once)
    if tier == "disk":
        async with running_engine(tiny_llama, kernel_cache, **settings, **drafting) as engine:
            await check(engine, histories[BLOCK_SIZE:])
