"""The engine's life: streams, aborts, limits, failure, closing. A real engine, a tiny model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine.async_engine import AsyncEngine
from engine.errors import (
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    StartupError,
)
from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams
from offload.disk_tier import DiskTier
from tests.running_engine import (
    Answer,
    ask,
    ask_all,
    assert_same_answer,
    engine_config,
    greedy,
    running_engine,
    seeded,
)

PROMPT = list(range(40, 61))


async def test_one_terminal_event_and_one_entry_per_token(
    tiny_llama: Path, kernel_cache: Path
) -> None:
    async with running_engine(tiny_llama, kernel_cache) as engine:
        answer = await ask(engine, PROMPT, greedy(7, logprobs=3))
        assert answer.finish_reason is FinishReason.LENGTH
        assert len(answer.token_ids) == len(answer.logprobs) == 7
        assert answer.num_events == 7
        for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True):
            assert entry.token_id == token_id
            assert entry.rank == 1
            assert [top.rank for top in entry.top] == [1, 2, 3]
            assert entry.top[0].token_id == token_id


async def test_prefill_only(tiny_llama: Path, kernel_cache: Path) -> None:
    """max_tokens 0: the prompt is computed and kept, nothing is drawn."""
    async with running_engine(tiny_llama, kernel_cache) as engine:
        answer = await ask(engine, PROMPT, greedy(0))
        assert (answer.token_ids, answer.text) == ([], "")
        assert answer.finish_reason is FinishReason.LENGTH
        again = await ask(engine, [*PROMPT, 1], greedy(1))
        assert again.cached.device == 20


async def test_no_limit_means_what_fits(tiny_llama: Path, kernel_cache: Path) -> None:
    async with running_engine(tiny_llama, kernel_cache, kv_blocks=10) as engine:
        assert engine.max_request_tokens == 40
        answer = await ask(
            engine, PROMPT, SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
        )
        assert len(answer.token_ids) == 40 - len(PROMPT)


async def test_a_request_that_can_never_fit_is_refused_and_the_next_served(
    tiny_llama: Path, kernel_cache: Path
) -> None:
    async with running_engine(tiny_llama, kernel_cache, kv_blocks=10) as engine:
        with pytest.raises(InvalidRequestError, match=r"44 tokens .*40 tokens") as refused:
            await ask(engine, list(range(3, 46)), greedy(1))
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(InvalidRequestError, match="41 tokens"):
            await ask(engine, PROMPT, greedy(20))
        assert len((await ask(engine, PROMPT, greedy(19))).token_ids) == 19


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "empty"), ([5, 384], "token id 384"), ([-1], "token id -1")],
)
async def test_bad_prompts_name_the_field(
    tiny_llama: Path, kernel_cache: Path, prompt: list[int], message: str
) -> None:
    async with running_engine(tiny_llama, kernel_cache) as engine:
        with pytest.raises(InvalidRequestError, match=message) as refused:
            await ask(engine, prompt)
        assert refused.value.param == "prompt"


async def test_the_same_id_twice_is_refused_while_it_lives(
    tiny_llama: Path, kernel_cache: Path
) -> None:
    async with running_engine(tiny_llama, kernel_cache) as engine:
        stream = engine.submit(PROMPT, greedy(5), request_id="one")
        with pytest.raises(InvalidRequestError, match="in use"):
            engine.submit(PROMPT, greedy(5), request_id="one")
        async for _ in stream:
            pass
        await ask(engine, PROMPT, greedy(1), request_id="one")


async def test_stop_id_is_in_the_ids_and_not_in_the_text(
    tiny_llama: Path, kernel_cache: Path
) -> None:
    async with running_engine(tiny_llama, kernel_cache) as engine:
        free = await ask(engine, PROMPT, seeded(12))
        stop = free.token_ids[5]
        count = free.token_ids.index(stop) + 1
        answer = await ask(engine, PROMPT, seeded(12, stop_token_ids=(stop,)))
        assert answer.token_ids == free.token_ids[:count]
        assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, stop)
        assert answer.text == engine.tokenizer.decode(free.token_ids[: count - 1])


async def test_eos_ends_and_ignore_eos_does_not(tiny_llama: Path, kernel_cache: Path) -> None:
    eos = 2
    forced = {"logit_bias": {eos: 100.0}}
    async with running_engine(tiny_llama, kernel_cache) as engine:
        answer = await ask(engine, PROMPT, greedy(6, ignore_eos=False, **forced))
        assert answer.token_ids == [eos]
        assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, None)
        assert answer.text == ""
        answer = await ask(engine, PROMPT, greedy(6, **forced))
        assert answer.token_ids == [eos] * 6
        answer = await ask(engine, PROMPT, greedy(6, ignore_eos=False, min_tokens=3, **forced))
        assert len(answer.token_ids) == 4
        assert eos not in answer.token_ids[:3]
        assert answer.token_ids[3] == eos


async def test_stop_string_cuts_the_text_and_keeps_the_ids(
    tiny_llama: Path, kernel_cache: Path
) -> None:
    async with running_engine(tiny_llama, kernel_cache) as engine:
        free = await ask(engine, PROMPT, seeded(24, seed=11))
        assert len(free.text) > 12
        stop = free.text[6:9]
        at = free.text.index(stop)
        answer = await ask(engine, PROMPT, seeded(24, seed=11, stop=(stop,)))
        assert answer.text == free.text[:at]
        assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, stop)
        assert answer.token_ids == free.token_ids[: len(answer.token_ids)]
        assert stop in engine.tokenizer.decode(answer.token_ids)
        assert stop not in engine.tokenizer.decode(answer.token_ids[:-1])


async def test_leaving_a_stream_aborts_its_request(tiny_llama: Path, kernel_cache: Path) -> None:
    async with running_engine(tiny_llama, kernel_cache) as engine:
        stream = engine.generate(PROMPT, greedy(200), request_id="left")
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(10):
            while engine.stats().num_running:
                await asyncio.sleep(0.01)
        assert engine.stats().finished == {"abort": 1}
        assert engine.stats().generation_tokens < 50


async def test_an_abort_reaches_a_waiting_request(tiny_llama: Path, kernel_cache: Path) -> None:
    async with running_engine(tiny_llama, kernel_cache, max_num_seqs=1) as engine:
        first = asyncio.create_task(ask(engine, PROMPT, greedy(60)))
        await asyncio.sleep(0.05)
        waiting = engine.submit(PROMPT, greedy(4), request_id="waiting")
        await engine.abort("waiting")
        outputs = [output async for output in waiting]
        assert [o.finish_reason for o in outputs] == [FinishReason.ABORT]
        assert outputs[0].token_ids == []
        assert len((await first).token_ids) == 60


async def test_the_queue_is_bounded(tiny_llama: Path, kernel_cache: Path) -> None:
    async with running_engine(tiny_llama, kernel_cache, max_num_seqs=2, max_queue=3) as engine:
        streams = [engine.submit(PROMPT, greedy(4), request_id=f"q{number}") for number in range(5)]
        with pytest.raises(QueueFullError) as refused:
            engine.submit(PROMPT, greedy(4), request_id="q5")
        assert refused.value.retry_after > 0
        with pytest.raises(QueueFullError):
            engine.check_capacity(1)
        for stream in streams:
            assert [o.finish_reason async for o in stream][-1] is FinishReason.LENGTH
        engine.check_capacity(5)
        await ask(engine, PROMPT, greedy(1))


async def test_a_failed_pass_ends_its_requests_alone(tiny_llama: Path, kernel_cache: Path) -> None:
    async with running_engine(tiny_llama, kernel_cache, max_num_seqs=2) as engine:
        expected = await ask(engine, PROMPT, greedy(5))
        runner = engine._core._runner
        plain_forward = runner._forward

        def fail_once(sequences):  # type: ignore[no-untyped-def]
            runner._forward = plain_forward  # type: ignore[method-assign]
            raise RuntimeError("planted")

        runner._forward = fail_once  # type: ignore[method-assign]
        answers = await ask_all(engine, [PROMPT] * 4, greedy(5))
        reasons = [answer.finish_reason for answer in answers]
        assert reasons == [FinishReason.ERROR] * 2 + [FinishReason.LENGTH] * 2
        for answer in answers[2:]:
            assert_same_answer(answer, expected)
        assert engine.healthy
        assert engine.stats().failed_steps == 1


async def test_poisoned_logits_end_their_own_request_alone(
    tiny_llama: Path, kernel_cache: Path
) -> None:
    async with running_engine(tiny_llama, kernel_cache) as engine:
        runner = engine._core._runner
        plain_logits = runner.logits

        def poison_first(packed):  # type: ignore[no-untyped-def]
            logits = plain_logits(packed)
            logits[0] = float("nan")
            return logits

        runner.logits = poison_first  # type: ignore[method-assign]
        answers = await ask_all(engine, [PROMPT, PROMPT[::-1]], greedy(1))
        assert [a.finish_reason for a in answers] == [FinishReason.ERROR, FinishReason.LENGTH]
        assert answers[0].error is not None


async def test_a_poisoned_chunk_of_a_prompt_is_not_kept(
    tiny_llama: Path, kernel_cache: Path
) -> None:
    """A chunk that draws nothing is judged too: its NaN must not wait in the cache for others."""
    async with running_engine(tiny_llama, kernel_cache, max_num_batched_tokens=16) as engine:
        runner = engine._core._runner
        plain_logits = runner.logits

        def poison(packed):  # type: ignore[no-untyped-def]
            return plain_logits(packed) * float("nan")

        runner.logits = poison  # type: ignore[method-assign]
        answer = await ask(engine, PROMPT, greedy(3))
        assert answer.finish_reason is FinishReason.ERROR
        runner.logits = plain_logits  # type: ignore[method-assign]
        again = await ask(engine, PROMPT, greedy(3))
        assert again.cached.total == 0
        assert again.finish_reason is FinishReason.LENGTH


async def test_a_dead_engine_tells_everybody_now_and_later(
    tiny_llama: Path, kernel_cache: Path
) -> None:
    engine = await AsyncEngine.from_config(engine_config(tiny_llama, kernel_cache))
    runner = engine._core._runner

    def fail(sequences):  # type: ignore[no-untyped-def]
        raise RuntimeError("planted")

    runner._forward = fail  # type: ignore[method-assign]
    for _ in range(2):
        assert (await ask(engine, PROMPT)).finish_reason is FinishReason.ERROR
        assert engine.healthy
    answers = await ask_all(engine, [PROMPT] * 3, greedy(3))
    assert {answer.finish_reason for answer in answers} == {FinishReason.ERROR}
    assert not engine.healthy
    assert engine.dead_reason == "RuntimeError: planted"
    with pytest.raises(EngineDeadError, match="planted"):
        engine.submit(PROMPT, greedy(1), request_id="later")
    await engine.close()


async def test_closing_drains(tiny_llama: Path, kernel_cache: Path) -> None:
    engine = await AsyncEngine.from_config(engine_config(tiny_llama, kernel_cache))
    running = asyncio.create_task(ask(engine, PROMPT, greedy(30)))
    await asyncio.sleep(0.05)
    closing = asyncio.create_task(engine.close(drain_timeout=30))
    await asyncio.sleep(0)
    with pytest.raises(EngineClosedError):
        engine.submit(PROMPT, greedy(1), request_id="late")
    assert (await running).finish_reason is FinishReason.LENGTH
    await closing
    await engine.close()  # twice is once


async def test_closing_twice_closes_the_tiers_once(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_closed = 0
    plain_close = DiskTier.close

    def close(tier: DiskTier) -> None:
        nonlocal num_closed
        num_closed += 1
        plain_close(tier)

    monkeypatch.setattr(DiskTier, "close", close)
    config = engine_config(tiny_llama, kernel_cache, disk_tier=tmp_path, disk_tier_size=64 << 20)
    engine = await AsyncEngine.from_config(config)
    await asyncio.gather(engine.close(), engine.close())
    await engine.close()
    assert num_closed == 1


async def test_closing_aborts_what_does_not_drain(tiny_llama: Path, kernel_cache: Path) -> None:
    engine = await AsyncEngine.from_config(engine_config(tiny_llama, kernel_cache))
    running = asyncio.create_task(ask(engine, PROMPT, greedy(200)))
    await asyncio.sleep(0.1)
    await engine.close(drain_timeout=0.0)
    answer: Answer = await running
    assert answer.finish_reason is FinishReason.ABORT
    assert len(answer.token_ids) < 200


async def test_a_leak_is_counted_when_idle_and_serving_goes_on(
    tiny_llama: Path, kernel_cache: Path
) -> None:
    engine = await AsyncEngine.from_config(engine_config(tiny_llama, kernel_cache))
    engine._core.kv.pool.allocate()  # a reference that no block table and no load accounts for
    engine._next_check = 0.0
    for _ in range(2):  # the second within the minute: counted once
        assert (await ask(engine, PROMPT, greedy(1))).finish_reason is FinishReason.LENGTH
    await asyncio.sleep(0.1)
    assert engine.stats().failed_checks == 1
    await engine.close()


async def test_an_idle_engine_sleeps(tiny_llama: Path, kernel_cache: Path) -> None:
    async with running_engine(tiny_llama, kernel_cache) as engine:
        await ask(engine, PROMPT)
        await asyncio.sleep(0.1)
        rounds = 0
        core, plain_step = engine._core, engine._core.step

        async def counted() -> bool:
            nonlocal rounds
            rounds += 1
            return await plain_step()

        core.step = counted  # type: ignore[method-assign]
        await asyncio.sleep(0.5)
        assert rounds == 0


async def test_seeded_answers_repeat_and_unseeded_ones_differ(
    tiny_llama: Path, kernel_cache: Path
) -> None:
    async with running_engine(tiny_llama, kernel_cache) as engine:
        one, two = [await ask(engine, PROMPT, seeded(12, seed=1)) for _ in range(2)]
        assert one.token_ids == two.token_ids
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        three, four = [await ask(engine, PROMPT, params) for _ in range(2)]
        assert three.token_ids != four.token_ids


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_num_seqs": 65, "max_num_batched_tokens": 64}, "--max-num-batched-tokens"),
        ({"kv_blocks": 3, "kv_memory": 1 << 20}, "--kv-memory or --kv-blocks"),
        ({"kv_blocks": None, "kv_memory": 100}, "holds 0 KV blocks"),
        ({"cpu_tier": 100}, "--cpu-tier 100: cpu tier: 100 bytes hold no block"),
        ({"disk_tier": Path("/proc/overwinter")}, "/proc/overwinter"),
        ({"speculative": "nonsense"}, "nonsense names no drafter"),
        ({"speculative": "no.such.module:Class"}, "no.such.module"),
        ({"model": "/no/such/directory"}, "/no/such/directory"),
    ],
)
async def test_what_cannot_start_says_why(
    tiny_llama: Path, kernel_cache: Path, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        await AsyncEngine.from_config(engine_config(tiny_llama, kernel_cache, **fields))
