"""A drafter changes no answer: not the tokens, their logprobs or their text, not where it ends.

What a request may ask of the sampler is here one thing at a time, so that each acts inside accepted
runs; every end falls on every place of a run. And what is drawn under drafts that know nothing has
the distribution that was asked for. In float32, on a tiny model.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
    greedy,
    new_text,
    running_engine,
    seeded,
)

NUM_DRAFTS = 5
RUN = NUM_DRAFTS + 1  # tokens of a run whose drafts are all accepted
LENGTH = 24
SPACIOUS = {"kv_blocks": 512, "max_num_seqs": 64, "max_num_batched_tokens": 512, "max_queue": 999}
DRAFTERS = ["AlwaysWrongDrafter", "RandomAcceptanceDrafter", "OracleDrafter", "ngram"]
ACCEPTING = DRAFTERS[1:]


def speculating(drafter: str, **overrides: Any) -> dict[str, Any]:
    spec = drafter if drafter.islower() else f"tests.drafters:{drafter}"
    return {**SPACIOUS, "speculative": spec, "speculative_tokens": NUM_DRAFTS, **overrides}


# --- what the sampler is asked for, one thing at a time -------------------------------------------

# Half of the vocabulary: without the mask of `min_tokens` hardly any answer gets far.
MANY_STOPS = tuple(range(3, 384, 2))
BIAS = {**dict.fromkeys(range(3, 384, 7), 4.0), 247: -100.0, 105: -100.0}

CASES: dict[str, SamplingParams] = {
    "greedy": greedy(LENGTH, logprobs=5),
    "seeded": seeded(LENGTH, temperature=0.8, logprobs=3),
    "hot": seeded(LENGTH, temperature=2.5),
    "top_k": seeded(LENGTH, temperature=2.5, top_k=3),
    "top_p": seeded(LENGTH, temperature=2.5, top_p=0.5),
    "min_p": seeded(LENGTH, temperature=2.5, min_p=0.2),
    "filters": seeded(LENGTH, temperature=1.5, top_k=30, top_p=0.8, min_p=0.02),
    "repetition": greedy(LENGTH, repetition_penalty=1.8),
    "presence": greedy(LENGTH, presence_penalty=2.0),
    "frequency": greedy(LENGTH, frequency_penalty=1.0),
    "negative frequency": seeded(LENGTH, temperature=1.5, frequency_penalty=-1.0),
    "penalties": seeded(
        LENGTH,
        temperature=0.8,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.5,
    ),
    "bias": greedy(LENGTH, logit_bias=BIAS),
    "seeded bias": seeded(LENGTH, temperature=0.8, logit_bias=BIAS, frequency_penalty=0.7),
    "min_tokens": seeded(
        LENGTH, temperature=0.8, min_tokens=LENGTH - 5, stop_token_ids=MANY_STOPS
    ),
    "greedy min_tokens": greedy(LENGTH, min_tokens=9, stop_token_ids=MANY_STOPS, logprobs=2),
}  # fmt: skip
PLAIN = {"greedy": greedy(LENGTH), "seeded": seeded(LENGTH, temperature=0.8)}


def prompt_of(number: int) -> list[int]:
    """A prompt that shares its first token with no other."""
    return [4 + number, *((17 * i + 29 * number) % 370 + 3 for i in range(9))]


PROMPTS = [prompt_of(number) for number in range(len(CASES))]


async def answers_to_cases(engine: AsyncEngine) -> list[Answer]:
    return await ask_all(engine, PROMPTS, list(CASES.values()))


@pytest.fixture(scope="module")
def alone(tiny_llama: Path, kernel_cache: Path) -> list[Answer]:
    """The answers without drafts, known to the drafters from now on."""

    async def run() -> tuple[list[Answer], list[Answer]]:
        async with running_engine(tiny_llama, kernel_cache, **SPACIOUS) as engine:
            answers = await answers_to_cases(engine)
            unasked = [
                greedy(LENGTH) if params.greedy else seeded(LENGTH, temperature=params.temperature)
                for params in CASES.values()
            ]
            return answers, await ask_all(engine, PROMPTS, unasked)

    answers, without = asyncio.run(run())
    for name, prompt, answer, plain in zip(CASES, PROMPTS, answers, without, strict=True):
        if name not in ("greedy", "seeded", "hot"):
            assert answer.token_ids != plain.token_ids, f"{name} changes nothing here"
        drafters.know(prompt, answer.token_ids)
    return answers


def assert_identical(actual: Answer, expected: Answer) -> None:
    """Tokens, logprobs and their alternatives, text and end."""
    assert_same_answer(actual, expected)
    assert [entry.token_id for entry in actual.logprobs] == actual.token_ids
    for ours, theirs in zip(actual.logprobs, expected.logprobs, strict=True):
        assert ours.rank == theirs.rank
        assert [top.token_id for top in ours.top] == [top.token_id for top in theirs.top]
    assert actual.text == expected.text
    assert actual.finish_reason == expected.finish_reason
    assert actual.stop_reason == expected.stop_reason


@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_whatever_the_sampler_is_asked_for(
    tiny_llama: Path, kernel_cache: Path, alone: list[Answer], drafter: str
) -> None:
    async with running_engine(tiny_llama, kernel_cache, **speculating(drafter)) as engine:
        answers = await answers_to_cases(engine)
        stats = engine.stats()
    for answer, expected in zip(answers, alone, strict=True):
        assert_identical(answer, expected)
    assert stats.drafter_failures == {}
    enough = 25 if drafter == "ngram" else 100  # it drafts where the answer repeats itself
    assert stats.spec_num_draft_tokens > enough
    assert (stats.spec_num_accepted_tokens > enough) is (drafter in ACCEPTING)


async def test_accepted_runs_stream_as_one_event_each(
    tiny_llama: Path, kernel_cache: Path, alone: list[Answer]
) -> None:
    """Joined, the deltas are the whole answer, and they came as runs."""
    async with running_engine(tiny_llama, kernel_cache, **speculating("OracleDrafter")) as engine:
        for prompt, params, expected in zip(PROMPTS, CASES.values(), alone, strict=True):
            events = [
                event async for event in engine.generate(prompt, params, request_id=str(prompt[0]))
            ]
            joined = Answer()
            for event in events:
                assert len(event.logprobs or []) == len(event.token_ids)
                joined.add(event)
                assert event.num_output_tokens == len(joined.token_ids)
            assert_identical(joined, expected)
            count = len(expected.token_ids)
            assert joined.num_events == 1 + math.ceil((count - 1) / RUN)


@pytest.mark.parametrize("drafter", ACCEPTING)
async def test_preempted_between_runs(
    tiny_llama: Path, kernel_cache: Path, alone: list[Answer], drafter: str
) -> None:
    settings = speculating(drafter, kv_blocks=24)
    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        for answer, expected in zip(await answers_to_cases(engine), alone, strict=True):
            assert_identical(answer, expected)
        stats = engine.stats()
        assert stats.preemptions > 0
        assert stats.spec_num_accepted_tokens > 0


# --- ends inside a run ----------------------------------------------------------------------------

PROMPT = prompt_of(200)
EOS = 2
COUNTS = range(2, 2 + 2 * RUN)  # the first token comes with the prompt, then two whole runs


@dataclass(frozen=True)
class End:
    """A request that ends after `count` tokens, inside or at the end of a run."""

    kind: str
    prompt: list[int]
    params: SamplingParams
    count: int
    stop_reason: int | str | None = None

    @property
    def place(self) -> int:
        """Which token of its run the last one is."""
        return (self.count - 2) % RUN


def first_at(token_ids: Sequence[int], count: int) -> bool:
    return token_ids[count - 1] not in token_ids[: count - 1]


async def ends(engine: AsyncEngine) -> list[End]:
    """Ends of every kind; the drafters know from now on how each answer would go on."""
    found = await ends_by_eos(engine) + await ends_after_min_tokens(engine)
    for prompt in (PROMPT, prompt_of(202)):
        plain = (await ask(engine, prompt, seeded(LENGTH))).token_ids
        drafters.know(prompt, plain)
        for count in COUNTS:
            found.append(End("length", prompt, seeded(count), count))
            last = plain[count - 1]
            if last not in plain[: count - 1]:
                params = seeded(LENGTH, stop_token_ids=(last,))
                found.append(End("stop id", prompt, params, count, last))
            if text := new_text(engine, plain, count):
                params = seeded(LENGTH, stop=(text,))
                found.append(End("stop string", prompt, params, count, text))
    return found


async def ends_by_eos(engine: AsyncEngine) -> list[End]:
    """Answers in which EOS is likely, wherever it then comes for the first time."""
    prompts = [prompt_of(250 + number) for number in range(32)]
    params = [seeded(LENGTH, seed, temperature=1.5, logit_bias={EOS: 5.0}) for seed in range(32)]
    answers = await ask_all(engine, prompts, params)
    found = []
    for prompt, asked, answer in zip(prompts, params, answers, strict=True):
        drafters.know(prompt, answer.token_ids)
        count = answer.token_ids.index(EOS) + 1 if EOS in answer.token_ids else 0
        if count in COUNTS:
            found.append(End("eos", prompt, replace(asked, ignore_eos=False), count))
    return found


async def ends_after_min_tokens(engine: AsyncEngine) -> list[End]:
    """The stop ids are half of the vocabulary, and none of them comes before it may."""
    found = []
    for least in COUNTS:
        prompt = prompt_of(150 + least)
        params = seeded(LENGTH, min_tokens=least, stop_token_ids=MANY_STOPS)
        answer = await ask(engine, prompt, params)
        count = len(answer.token_ids)
        assert count > least
        assert not set(answer.token_ids[:least]) & set(MANY_STOPS)
        drafters.know(prompt, [*answer.token_ids, *range(40, 40 + NUM_DRAFTS)])
        if count < LENGTH:
            found.append(End("min_tokens", prompt, params, count, answer.token_ids[-1]))
    return found


async def test_every_end_at_every_place_of_a_run(tiny_llama: Path, kernel_cache: Path) -> None:
    async with running_engine(tiny_llama, kernel_cache, **SPACIOUS) as engine:
        cases = await ends(engine)
        prompts, params = [case.prompt for case in cases], [case.params for case in cases]
        expected = await ask_all(engine, prompts, params)
    places: dict[str, set[int]] = {}
    for case, answer in zip(cases, expected, strict=True):
        places.setdefault(case.kind, set()).add(case.place)
        assert len(answer.token_ids) == case.count
        assert answer.stop_reason == case.stop_reason
        by_length = case.kind == "length"
        assert answer.finish_reason == (FinishReason.LENGTH if by_length else FinishReason.STOP)
    assert {kind: len(found) for kind, found in places.items()} == dict.fromkeys(places, RUN)
    async with running_engine(tiny_llama, kernel_cache, **speculating("OracleDrafter")) as engine:
        answers = await ask_all(engine, prompts, params)
        assert engine.stats().drafter_failures == {}
    for case, answer, truth in zip(cases, answers, expected, strict=True):
        assert_identical(answer, truth)
        assert answer.num_events == 1 + math.ceil((case.count - 1) / RUN), case


async def test_an_abort_leaves_a_run_whole(tiny_llama: Path, kernel_cache: Path) -> None:
    """Whenever it comes, the answer is the beginning of the true one, a logprob to each token."""
    async with running_engine(tiny_llama, kernel_cache, **SPACIOUS) as engine:
        truth = await ask(engine, PROMPT, seeded(LENGTH))
        drafters.know(PROMPT, truth.token_ids)
    async with running_engine(tiny_llama, kernel_cache, **speculating("OracleDrafter")) as engine:
        for runs in range(3):
            answer = Answer()
            async for event in engine.generate(PROMPT, seeded(LENGTH), request_id=f"abort {runs}"):
                answer.add(event)
                if answer.num_events == 1 + runs:
                    await engine.abort(f"abort {runs}")
            assert answer.finish_reason is FinishReason.ABORT
            num_tokens = len(answer.token_ids)
            assert num_tokens >= 1 + RUN * runs
            assert (num_tokens - 1) % RUN == 0
            assert answer.token_ids == truth.token_ids[:num_tokens]
            assert len(answer.logprobs) == num_tokens


# --- the distribution of what is drawn ------------------------------------------------------------

WORDS = drafters.FewWordsDrafter.WORDS
NUM_WORDS = 5
NUM_ANSWERS = 500
ALL_ANSWERS = list(itertools.product(WORDS, repeat=NUM_WORDS))


def few_words(seed: int, **fields: Any) -> SamplingParams:
    """A sequence of two words whose distribution is known: bias shuts out all others."""
    bias = dict.fromkeys(WORDS, 100.0)
    return seeded(
        NUM_WORDS, seed, temperature=5.0, logit_bias=bias, presence_penalty=-1.0, **fields
    )


async def probabilities(engine: AsyncEngine) -> dict[tuple[int, ...], float]:
    """Of every possible answer, from the raw logprobs of each word in its context."""
    asked = SamplingParams(max_tokens=0, prompt_logprobs=0)
    answers = await ask_all(engine, [[*PROMPT, *words] for words in ALL_ANSWERS], asked)
    raw: dict[tuple[int, ...], float] = {}
    for words, answer in zip(ALL_ANSWERS, answers, strict=True):
        assert answer.prompt_logprobs is not None
        for length, entry in enumerate(answer.prompt_logprobs[-NUM_WORDS:], start=1):
            assert entry is not None
            raw[words[:length]] = entry.logprob

    def conditional(before: tuple[int, ...], word: int) -> float:
        weights = {w: math.exp((raw[(*before, w)] + (w in before)) / 5.0) for w in WORDS}
        return weights[word] / math.fsum(weights.values())

    return {
        words: math.prod(conditional(words[:i], words[i]) for i in range(NUM_WORDS))
        for words in ALL_ANSWERS
    }


@pytest.mark.parametrize("drafter", ["FewWordsDrafter", "OneWordDrafter"])
async def test_what_is_drawn_under_drafts_has_the_distribution_asked_for(
    tiny_llama: Path, kernel_cache: Path, drafter: str
) -> None:
    """Chi-square over all answers at once, so that dependence between the draws of one run shows:
    31 degrees of freedom, and 61.1 is exceeded by chance once in a thousand. The seeds are fixed,
    so is the result."""
    async with running_engine(tiny_llama, kernel_cache, **speculating(drafter)) as engine:
        expected = await probabilities(engine)
        assert math.fsum(expected.values()) == pytest.approx(1.0)
        assert min(expected.values()) * NUM_ANSWERS > 1.0
        params = [few_words(seed) for seed in range(NUM_ANSWERS)]
        answers = await ask_all(engine, [PROMPT] * NUM_ANSWERS, params)
        assert engine.stats().spec_num_accepted_tokens > 100
    counts = Counter(tuple(answer.token_ids) for answer in answers)
    statistic = math.fsum(
        (counts[words] - NUM_ANSWERS * p) ** 2 / (NUM_ANSWERS * p) for words, p in expected.items()
    )
    assert statistic < 61.1
