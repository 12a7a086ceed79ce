"""A real engine on a tiny model, in process, with conservation laws checked after every step."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.outputs import CachedTokens, FinishReason, RequestOutput, TokenLogprobs
from engine.sampling_params import SamplingParams

# Two runs of one request differ by summation order alone: float32 logits of this size, summed in
# another order, stay within 1e-4; a single poisoned KV slot moves them by more than 1e-2.
LOGPROB_TOLERANCE = 1e-3


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""
    cached: CachedTokens = field(default_factory=CachedTokens)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    recomputed_by_choice: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_events: int = 0
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0

    def add(self, output: RequestOutput) -> None:
        assert self.finish_reason is None, "an event after the terminal one"
        self.num_events += 1
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        self.text += output.text
        self.cached = output.cached
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        self.error = output.error
        self.recomputed_by_choice = output.recomputed_by_choice
        self.num_accepted_drafts = output.num_accepted_drafts
        self.num_rejected_drafts = output.num_rejected_drafts
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "prompt logprobs come once"
            self.prompt_logprobs = output.prompt_logprobs


def engine_config(model_dir: Path, cache_dir: Path, **overrides: Any) -> EngineConfig:
    """Small blocks and a small pool, float32, one thread; `overrides` replace fields."""
    fields: dict[str, Any] = {
        "model": str(model_dir),
        "cache_dir": cache_dir,
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "block_size": 4,
        "kv_memory": None,
        "kv_blocks": 64,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "cpu_tier": 0,
        "load_policy": "always",
        "seed": 0,
        "speculative": "off",
        "speculative_depth": "fixed",  # drafts at every step, whether they pay or not
    }
    return EngineConfig(**{**fields, **overrides})


@contextlib.asynccontextmanager
async def running_engine(
    model: Path, cache_dir: Path, **overrides: Any
) -> AsyncIterator[AsyncEngine]:
    """Start, check conservation after every step, close; at the end nothing may be held."""
    engine = await AsyncEngine.from_config(engine_config(model, cache_dir, **overrides))
    core = engine._core
    if core._speculation is not None:  # a busy machine must not cost the drafts that tests count
        core._speculation._drafter._deadline = 60.0
    plain_step = core.step

    async def checked_step() -> bool:
        did_something = await plain_step()
        core.check()
        return did_something

    core.step = checked_step  # type: ignore[method-assign]
    try:
        yield engine
        stats = engine.stats()
        assert engine.dead_reason is None
    finally:
        await engine.close()
    assert stats.num_running == stats.num_waiting == 0, "a request was left behind"
    assert stats.kv_cache_usage == 0.0, "blocks were left referenced"


_numbers = iter(range(1, 1 << 30))


async def ask(
    engine: AsyncEngine,
    prompt: str | Sequence[int],
    params: SamplingParams | None = None,
    **submit: Any,
) -> Answer:
    """One whole answer, with logprobs unless `params` says otherwise."""
    params = params or SamplingParams(max_tokens=8, temperature=0.0, logprobs=0, ignore_eos=True)
    request_id = submit.pop("request_id", f"test-{next(_numbers)}")
    answer = Answer()
    async for output in engine.generate(prompt, params, request_id=request_id, **submit):
        answer.add(output)
    assert answer.finish_reason is not None, "the stream ended without a terminal event"
    return answer


async def ask_all(
    engine: AsyncEngine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    **submit: Any,
) -> list[Answer]:
    """All at once."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    return list(
        await asyncio.gather(
            *(ask(engine, prompt, p, **submit) for prompt, p in zip(prompts, each, strict=True))
        )
    )


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    defaults: dict[str, Any] = {"temperature": 0.0, "logprobs": 0, "ignore_eos": True}
    return SamplingParams(max_tokens=max_tokens, **{**defaults, **fields})


def seeded(max_tokens: int, seed: int = 7, **fields: Any) -> SamplingParams:
    """Sampled, so that a random model's answer does not fall into a loop."""
    defaults: dict[str, Any] = {"temperature": 1.0, "logprobs": 0, "ignore_eos": True}
    return SamplingParams(max_tokens=max_tokens, seed=seed, **{**defaults, **fields})


def assert_same_answer(actual: Answer, expected: Answer) -> None:
    """Same tokens, same logprobs within `LOGPROB_TOLERANCE`."""
    assert actual.token_ids == expected.token_ids
    assert len(actual.logprobs) == len(expected.logprobs)
    for position, (ours, theirs) in enumerate(zip(actual.logprobs, expected.logprobs, strict=True)):
        difference = abs(ours.logprob - theirs.logprob)
        assert difference <= LOGPROB_TOLERANCE, f"logprob {position} is off by {difference}"


def new_text(engine: AsyncEngine, token_ids: Sequence[int], count: int) -> str:
    """The text that token `count` adds, if it is a whole character not seen before."""
    before = engine.tokenizer.decode(token_ids[: count - 1])
    after = engine.tokenizer.decode(token_ids[:count])
    piece = after[len(before) :]
    return piece if after.startswith(before) and piece.isascii() and piece not in before else ""


async def saves_done(engine: AsyncEngine) -> None:
    """Until every save has reached its tier, without flushing."""
    async with asyncio.timeout(30):
        while any(tier.pending_saves for tier in engine.stats().tiers.values()):
            await asyncio.sleep(0.005)


def computes_ahead(engine: AsyncEngine) -> bool:
    """Whether a prompt to compute in idle time waits or is under way."""
    ahead = engine._idle_prefill
    return bool(ahead._queue or ahead._reading or ahead._ready or ahead._live)


async def evict_device(engine: AsyncEngine) -> None:
    """Push everything out of the device's prefix map the way load does: fill the pool."""
    await saves_done(engine)
    pool = engine._core.kv.pool
    held = list(pool._cached)
    for _ in range(50):  # one is enough unless sliding windows let go of most of it
        length = engine.max_request_tokens - 1
        filler = [(3 + 7 * i) % (engine.model.vocab_size - 3) + 3 for i in range(length)]
        answer = await ask(engine, filler, greedy(1), cache_salt=f"filler-{next(_numbers)}")
        assert answer.cached.total == 0
        if not any(pool.lookup(key) is not None for key in held):
            break
    await saves_done(engine)
