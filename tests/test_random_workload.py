"""A random workload of everything at once, from a seed that plays it again.

Conversations grow turn by turn under several salts and priorities, greedy and seeded; clients
abort, leave and never read; the pool is far too small; a drafter is wrong or half right; the CPU
tier holds a few blocks and the disk fails, hangs and drags its feet by turns; caches are reset and
flushed; the engine starts anew on the same directory. Every answer is compared with that of an
engine that caches nothing, every step with the conservation laws.

A failure prints its seed and what was done until then. One seed, or a longer script, by hand:

    WORKLOAD_SEED=17 WORKLOAD_OPERATIONS=5000 make test TEST_ARGS=tests/test_random_workload.py

What is done depends on the seed alone; when it takes effect depends on the machine too, so a seed
that fails one time in five is worth repeating.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from engine import assembly
from engine.async_engine import AsyncEngine, RequestStream
from engine.errors import QueueFullError
from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams
from tests import drafters
from tests.offload.harness import FaultyTier, physical_bytes
from tests.running_engine import (
    LOGPROB_TOLERANCE,
    Answer,
    ask,
    greedy,
    running_engine,
    saves_done,
    seeded,
)
from tests.tiny_models import make_tiny_model

BLOCK_SIZE = 4
LONGEST_ANSWER = 15
LONGEST_PROMPT = 44
SALTS = [None, None, None, "a", "b"]
DRAFTERS = ["off", "tests.drafters:AlwaysWrongDrafter", "tests.drafters:RandomAcceptanceDrafter"]
FAULTS = [OSError(errno.EIO, "planted"), OSError(errno.ENOSPC, "planted"), RuntimeError("a bug")]
# A draw flips where two runs, a summation order apart, fall on two sides of a boundary of the
# inverse CDF: with differences below 1e-5 that is one token in 1e5, and a handful here would mean
# something else. Each one is proven to be one; see `Workload._prove_tie`.
MAX_TIES = 3


@dataclass(frozen=True)
class Plan:
    """A request before it is made. `truth` answers it, as far as it goes."""

    prompt: tuple[int, ...]
    params: SamplingParams
    salt: str | None
    priority: int
    fate: str  # read | abort | leave | drop
    patience: int  # events until it aborts or leaves


@dataclass
class Script:
    """The operations so far, to be printed."""

    seed: int
    lines: list[str] = field(default_factory=list)

    def note(self, line: str) -> None:
        self.lines.append(line)

    def __str__(self) -> str:
        return "\n".join([f"WORKLOAD_SEED={self.seed}", *self.lines[-400:]])


class References:
    """What a request is answered where nothing is cached, computed once per prompt.

    The longest answer is kept: a shorter one, however it ends, is a beginning of it.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._answers: dict[tuple[int, ...], Answer] = {}
        self._number = 0

    async def prepare(self, prompts: Sequence[tuple[int, ...]]) -> None:
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._answers]
        for begin in range(0, len(new), 64):
            part = new[begin : begin + 64]
            jobs = []
            for prompt in part:
                self._number += 1
                params = replace(sampling_of(prompt), max_tokens=LONGEST_ANSWER, prompt_logprobs=0)
                jobs.append(ask(self._engine, prompt, params, cache_salt=f"once-{self._number}"))
            for prompt, answer in zip(part, await asyncio.gather(*jobs), strict=True):
                assert answer.cached.total == 0
                assert len(answer.token_ids) == LONGEST_ANSWER
                self._answers[prompt] = answer
                drafters.know(prompt, answer.token_ids)

    def __getitem__(self, prompt: tuple[int, ...]) -> Answer:
        return self._answers[prompt]

    def __len__(self) -> int:
        return len(self._answers)

    async def forced(self, prompt: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        """The logprobs of `token_ids` after `prompt`, as prompt logprobs of a cold run."""
        self._number += 1
        salt = f"forced-{self._number}"
        params = greedy(0, prompt_logprobs=0)
        answer = await ask(self._engine, [*prompt, *token_ids], params, cache_salt=salt)
        assert answer.prompt_logprobs is not None
        entries = answer.prompt_logprobs[len(prompt) :]
        return [entry.logprob for entry in entries if entry is not None]


def sampling_of(prompt: Sequence[int]) -> SamplingParams:
    """How this prompt is always sampled, so that it has one answer, which the drafters know."""
    rng = random.Random(repr(tuple(prompt)))
    kinds = [
        greedy(1),
        seeded(1, seed=rng.getrandbits(32)),
        seeded(1, seed=rng.getrandbits(32), top_k=20, top_p=0.9),
        seeded(1, seed=rng.getrandbits(32), repetition_penalty=1.2, presence_penalty=0.5),
    ]
    return rng.choice(kinds)


class Disk:
    """The disk tiers of one directory, one after the other, and what is wrong with them now."""

    def __init__(self) -> None:
        self.tier: FaultyTier | None = None
        self._faults: dict[str, Exception] = {}
        self._hanging: set[str] = set()
        self._delays: dict[str, float] = {}

    def wrap(self, tier: Any) -> FaultyTier:
        self.tier = FaultyTier(tier)
        self._apply()
        return self.tier

    def mend(self) -> None:
        """Everything works again; what hung goes on."""
        self.spoil({}, set(), {})

    def spoil(
        self, faults: dict[str, Exception], hanging: set[str], delays: dict[str, float]
    ) -> None:
        self._faults, self._hanging, self._delays = faults, hanging, delays
        self._apply()

    def _apply(self) -> None:
        tier = self.tier
        if tier is None:
            return
        tier.faults, tier.hanging, tier.delays = self._faults, self._hanging, self._delays
        if not self._hanging:
            tier.release.set()
            tier.release = threading.Event()


class Workload:
    """One seed's script and its clients."""

    def __init__(self, seed: int, model: Path, cache: Path, store: Path, disk: Disk) -> None:
        self.rng = random.Random(seed)
        self.script = Script(seed)
        self.disk = disk
        self.counts: Counter[str] = Counter()
        self._model, self._cache, self._store = model, cache, store
        self._systems = [self._tokens(size) for size in (5, 9, 18)]
        self._asked: list[tuple[int, ...]] = []
        self._histories: list[tuple[int, ...]] = []  # prompts with beginnings of their answers
        self._clients: set[asyncio.Task[None]] = set()
        self._steps = 0
        self._known_cached: Counter[str] = Counter()
        self._number = 0

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(3, 380) for _ in range(count))

    # --- an engine's life -------------------------------------------------------------------

    async def run(self, num_operations: int, num_lives: int) -> None:
        async with running_engine(
            self._model,
            self._cache,
            kv_blocks=64 * (LONGEST_PROMPT + LONGEST_ANSWER) // BLOCK_SIZE + 64,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
        ) as engine:
            self.references = References(engine)
            for life in range(num_lives):
                await self._live(num_operations // num_lives, life)

    async def _live(self, num_operations: int, life: int) -> None:
        rng = self.rng
        settings: dict[str, Any] = {
            "kv_blocks": rng.choice([18, 22, 28]),
            "max_num_seqs": rng.choice([6, 16]),
            "max_num_batched_tokens": rng.choice([16, 24, 64]),
            "cpu_tier": [16 << 10, 48 << 10, 0][(life + self.script.seed) % 3],
            "disk_tier": self._store,
            "disk_tier_size": rng.choice([1 << 20, 16 << 20]),
            "load_policy": rng.choice(["always", "always", "auto"]),
            "load_deadline": 0.3,
            "speculative": DRAFTERS[life % len(DRAFTERS)],
            "speculative_tokens": 4,
            "offload_prompt_only": rng.random() < 0.2,
        }
        self.script.note(f"start {settings}")
        self.disk.mend()
        self._known_cached.clear()
        async with AsyncExitStack() as stack:
            running = running_engine(self._model, self._cache, **settings)
            self.engine = await stack.enter_async_context(running)
            self._count_steps()
            done = 0
            while done < num_operations:
                done += await self._wave(min(60, num_operations - done))
            await self._rest()
            self._check_counters()
            await self._check_replays(settings)
        assert physical_bytes(self._store) <= settings["disk_tier_size"] + self._old_bytes
        self._old_bytes = physical_bytes(self._store)

    _old_bytes = 0  # what an earlier life with a larger disk may have left

    def _count_steps(self) -> None:
        plain_step = self.engine._core.step

        async def counted_step() -> bool:
            self._steps += 1
            return await plain_step()

        self.engine._core.step = counted_step  # type: ignore[method-assign]

    async def _wave(self, num_operations: int) -> int:
        """Operations in random order; the answers that they need are prepared before."""
        operations: list[Callable[[], Awaitable[None]]] = []
        plans = [self._plan() for _ in range(int(num_operations * 0.7))]
        await self.references.prepare([plan.prompt for plan in plans])
        for plan in plans:
            operations.append(lambda plan=plan: self._submit(plan))
        others = [self._fault, self._fault, self._pass, self._pass, self._reset, self._flush]
        while len(operations) < num_operations:
            operations.append(self.rng.choice(others))
        self.rng.shuffle(operations)
        for operation in operations:
            await operation()
            self._raise_failures()
        for plan in plans:
            answer = self.references[plan.prompt].token_ids[: self.rng.randrange(LONGEST_ANSWER)]
            self._histories.append((*plan.prompt, *answer))
            self._asked.append(plan.prompt)
        return num_operations

    # --- clients ----------------------------------------------------------------------------

    def _plan(self) -> Plan:
        rng = self.rng
        kind = rng.random()
        recent = self._histories[-40:]
        if self._asked and kind < 0.35:
            prompt = rng.choice(self._asked[-60:])
        elif recent and kind < 0.4:
            prompt = rng.choice(recent)
            prompt = prompt[: rng.randrange(1, len(prompt) + 1)]
        elif recent and kind < 0.75:
            prompt = (*rng.choice(recent), *self._tokens(rng.randrange(1, 9)))
        else:
            prompt = (*rng.choice(self._systems), *self._tokens(rng.randrange(1, 20)))
        prompt = prompt if len(prompt) <= LONGEST_PROMPT else prompt[:LONGEST_PROMPT:2]
        fields: dict[str, Any] = {"max_tokens": rng.randrange(LONGEST_ANSWER + 1)}
        if rng.random() < 0.2:
            fields["logprobs"] = None
        if rng.random() < 0.08:
            fields["prompt_logprobs"] = 0
        if rng.random() < 0.3:
            fields["stop_token_ids"] = self._tokens(40)
        return Plan(
            prompt,
            replace(sampling_of(prompt), **fields),
            rng.choice(SALTS),
            rng.choice([0, 0, 0, -1, 1]),
            rng.choice(["read"] * 7 + ["abort", "leave", "drop"]),
            rng.randrange(12),
        )

    async def _submit(self, plan: Plan) -> None:
        self._number += 1
        name = f"{self.script.seed}-{self._number}"
        self.script.note(
            f"submit {name} {len(plan.prompt)} tokens from {plan.prompt[:3]}, salt {plan.salt},"
            f" max_tokens {plan.params.max_tokens}, {plan.fate} after {plan.patience}"
        )
        try:
            stream = self.engine.submit(
                plan.prompt,
                plan.params,
                request_id=name,
                cache_salt=plan.salt,
                priority=plan.priority,
            )
        except QueueFullError:
            self.counts["refused"] += 1
            return
        self.counts["submitted"] += 1
        client = asyncio.create_task(self._client(plan, stream), name=name)
        self._clients.add(client)

    async def _client(self, plan: Plan, stream: RequestStream) -> None:
        answer = Answer()
        if plan.fate == "drop":
            await self._pass()
            await stream.aclose()
            self.counts["dropped"] += 1
            return
        async for output in stream:
            answer.add(output)
            if answer.num_events == plan.patience and plan.fate == "abort":
                await self.engine.abort(stream.request_id)
            if answer.num_events == plan.patience and plan.fate == "leave":
                break
        if plan.fate == "leave" and answer.finish_reason is None:
            await stream.aclose()
            self.counts["left"] += 1
        else:
            assert answer.finish_reason is not None, "the stream ended without a terminal event"
            self.counts[answer.finish_reason] += 1
        await self._judge(plan, answer)
        for tier in ("device", "cpu", "disk"):
            self._known_cached[tier] += getattr(answer.cached, tier)

    async def _judge(self, plan: Plan, answer: Answer) -> None:
        assert answer.error is None, answer.error
        limit = (len(plan.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert answer.cached.total <= limit
        for tier in ("device", "cpu", "disk"):
            assert getattr(answer.cached, tier) % BLOCK_SIZE == 0
        truth = self.references[plan.prompt]
        expected = self._expected_ids(plan, truth)
        if answer.finish_reason is None or answer.finish_reason is FinishReason.ABORT:
            expected = expected[: len(answer.token_ids)]
        if answer.token_ids != expected:
            await self._prove_tie(plan, answer, truth)
            return
        if plan.params.logprobs is not None:
            assert len(answer.logprobs) == len(expected)
            for ours, theirs in zip(answer.logprobs, truth.logprobs, strict=False):
                assert ours.token_id == theirs.token_id
                assert abs(ours.logprob - theirs.logprob) <= LOGPROB_TOLERANCE
        if plan.params.prompt_logprobs is not None and answer.num_events:
            self._compare_prompt_logprobs(answer, truth)

    @staticmethod
    def _expected_ids(plan: Plan, truth: Answer) -> list[int]:
        assert plan.params.max_tokens is not None
        expected = truth.token_ids[: plan.params.max_tokens]
        for length, token_id in enumerate(expected, start=1):
            if token_id in plan.params.stop_token_ids:
                return expected[:length]
        return expected

    @staticmethod
    def _compare_prompt_logprobs(answer: Answer, truth: Answer) -> None:
        if answer.prompt_logprobs is None or len(answer.prompt_logprobs) == 0:
            assert answer.finish_reason is FinishReason.ABORT
            return
        assert answer.cached.total == 0
        assert truth.prompt_logprobs is not None
        whole = answer.finish_reason is not FinishReason.ABORT or answer.token_ids
        pairs = zip(answer.prompt_logprobs, truth.prompt_logprobs, strict=bool(whole))
        for ours, theirs in pairs:
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                assert ours.token_id == theirs.token_id
                assert abs(ours.logprob - theirs.logprob) <= LOGPROB_TOLERANCE

    async def _prove_tie(self, plan: Plan, answer: Answer, truth: Answer) -> None:
        """The answer departs from the truth. Was it the draw alone?

        Then its logprobs are those of its own tokens, computed cold: a wrong KV slot moves them by
        more than ten tolerances. And it is rare.
        """
        self.counts["ties"] += 1
        assert self.counts["ties"] <= MAX_TIES, "too many answers differ"
        assert plan.params.logprobs is not None, "an answer differs, and nothing tells why"
        assert answer.token_ids[:1] == truth.token_ids[:1] or answer.token_ids
        forced = await self.references.forced(plan.prompt, answer.token_ids)
        for ours, theirs in zip(answer.logprobs, forced, strict=True):
            assert abs(ours.logprob - theirs) <= LOGPROB_TOLERANCE

    def _raise_failures(self) -> None:
        for client in [client for client in self._clients if client.done()]:
            self._clients.discard(client)
            client.result()

    # --- everybody else ---------------------------------------------------------------------

    async def _pass(self) -> None:
        """Let a few steps go by, or the engine fall idle."""
        until = self._steps + self.rng.randrange(1, 12)
        # Not as long as a client lives: one that waits here would wait for itself.
        while self._steps < until and self._has_work():
            await asyncio.sleep(0.001)

    def _has_work(self) -> bool:
        stats = self.engine.stats()
        return stats.num_running + stats.num_waiting > 0

    async def _fault(self) -> None:
        rng = self.rng
        calls = ("read", "write")
        faults, hanging, delays = {}, set(), {}
        if rng.random() < 0.7:
            faults = {call: rng.choice(FAULTS) for call in calls if rng.random() < 0.4}
            hanging = {call for call in calls if rng.random() < 0.15}
            delays = {call: 0.004 for call in calls if rng.random() < 0.3}
        self.script.note(f"faults {faults} hanging {hanging} slow {delays}")
        self.counts["faults"] += 1
        self.disk.spoil(faults, hanging, delays)

    async def _reset(self) -> None:
        names = ["device", *self.engine.stats().tiers]
        tiers = self.rng.choice([names, ["device"], ["disk"], names[1:]])
        self.script.note(f"reset {tiers}")
        self.counts["resets"] += 1
        self._clients.add(asyncio.create_task(self._finish_reset(tiers)))

    async def _finish_reset(self, tiers: list[str]) -> None:
        await self.engine.cache_reset(tiers)

    async def _flush(self) -> None:
        self.script.note("flush")
        self.counts["flushes"] += 1
        self._clients.add(asyncio.create_task(self._finish_flush()))

    async def _finish_flush(self) -> None:
        await self.engine.cache_flush()

    # --- at rest ----------------------------------------------------------------------------

    async def _rest(self) -> None:
        """Nothing fails any more, everybody gets an end, and no gauge is left."""
        self.script.note("rest")
        self.disk.mend()
        async with asyncio.timeout(120):
            while self._clients:
                self._raise_failures()
                await asyncio.sleep(0.002)
        await saves_done(self.engine)
        stats = self.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
        assert stats.failed_steps == stats.failed_checks == 0
        async with asyncio.timeout(30):
            while any(tier.pinned_blocks for tier in self.engine.stats().tiers.values()):
                await asyncio.sleep(0.002)

    def _check_counters(self) -> None:
        """Nothing was cached that nobody was told of, but for those who did not read."""
        stats = self.engine.stats()
        for tier, tokens in self._known_cached.items():
            assert stats.hit_tokens.get(tier, 0) >= tokens
        below = sum(stats.hit_tokens.get(tier, 0) for tier in ("cpu", "disk"))
        assert stats.external_hits == below
        assert stats.prefix_cache_hits == stats.hit_tokens.get("device", 0)
        self.counts["preemptions"] += stats.preemptions
        self.counts["accepted drafts"] += stats.spec_num_accepted_tokens
        self.counts["rejected drafts"] += (
            stats.spec_num_draft_tokens - stats.spec_num_accepted_tokens
        )
        for tier in ("device", "cpu", "disk"):
            self.counts[f"{tier} tokens"] += stats.hit_tokens.get(tier, 0)
        self.counts["failed blocks"] += sum(t.failed_blocks for t in stats.tiers.values())

    async def _check_replays(self, settings: dict[str, Any]) -> None:
        """Where nothing is evicted, a replay hits exactly what was committed. Each under a salt of
        its own: an earlier, longer answer to the same prompt would be found too."""
        for history in self.rng.sample(self._histories, 3):
            prompt, salt = history[:LONGEST_PROMPT], f"replay {self.counts['replays']}"
            await self.references.prepare([prompt])
            params = replace(sampling_of(prompt), max_tokens=7)
            answer = await ask(self.engine, prompt, params, cache_salt=salt)
            assert answer.token_ids == self.references[prompt].token_ids[:7]
            again = [*prompt, *answer.token_ids, 5]
            replay = await ask(self.engine, again, greedy(1), cache_salt=salt)
            committed = len(prompt) + 7 - 1
            assert replay.cached.total == committed // BLOCK_SIZE * BLOCK_SIZE
            self.counts["replays"] += 1


def seeds(count: int) -> list[int]:
    chosen = os.environ.get("WORKLOAD_SEED")
    return list(range(count)) if chosen is None else [int(chosen)]


async def play(
    seed: int, operations: int, lives: int, paths: tuple[Path, Path, Path], disk: Disk
) -> Counter[str]:
    work = Workload(seed, *paths, disk)
    operations = int(os.environ.get("WORKLOAD_OPERATIONS", operations))
    started = time.monotonic()
    try:
        await work.run(operations, lives)
    except BaseException:
        print(work.script)
        raise
    finally:
        disk.mend()
        for client in work._clients:
            client.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await client
    print(f"seed {seed}: {time.monotonic() - started:.1f} s, {dict(work.counts)}")
    return work.counts


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """The disk tier of every engine started in this test fails when it is told to."""
    disk = Disk()
    plain_open = assembly._open_tiers

    def open_faulty(*arguments: Any) -> list[Any]:
        opened: list[Any] = plain_open(*arguments)
        return [disk.wrap(tier) if tier.name == "disk" else tier for tier in opened]

    monkeypatch.setattr(assembly, "_open_tiers", open_faulty)
    return disk


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest model whose KV depends on all tokens before."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "two", num_hidden_layers=2)


@pytest.mark.parametrize("seed", seeds(2))
async def test_a_random_workload(
    two_layers: Path, kernel_cache: Path, tmp_path: Path, disk: Disk, seed: int
) -> None:
    counts = await play(seed, 500, 3, (two_layers, kernel_cache, tmp_path / "kv"), disk)
    for what in ("preemptions", "accepted drafts", "rejected drafts", "cpu tokens", "disk tokens"):
        assert counts[what] > 0, f"the workload had no {what}"


@pytest.mark.soak
@pytest.mark.parametrize("seed", seeds(20))
async def test_a_long_random_workload(
    two_layers: Path, kernel_cache: Path, tmp_path: Path, disk: Disk, seed: int
) -> None:
    counts = await play(seed, 6000, 12, (two_layers, kernel_cache, tmp_path / "kv"), disk)
    assert counts["submitted"] > 0.5 * int(os.environ.get("WORKLOAD_OPERATIONS", 6000))
