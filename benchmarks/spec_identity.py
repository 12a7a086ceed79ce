"""Whether drafts change answers on the real model: every drafter against none, answer by answer.

    PYTHONPATH=. python benchmarks/spec_identity.py --draft DIR
    PYTHONPATH=. python benchmarks/spec_identity.py --dtype bfloat16 --num-prompts 50

Each prompt is answered greedily and with a seed at temperature 0.8, by one engine per drafter, one
after the other, in this process. Some prompts go on as they began, so that drafts are accepted. The
drafters that know the truth are told what came without drafts. Two answers that differ are judged
where they part, by how near to another token the first engine was there:

    greedy  the margin: what the logprobs of its two likeliest tokens differ by
    seeded  the distance of the noise, a number between 0 and 1, from the nearer end of the drawn
            token's interval in the cumulative distribution

Below `--near-tie` another order of summation may choose the other token, with drafts or without:
the row `off again` is no drafter at all, and fewer requests at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import engine.sampler
from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.distribution import FloatRow, draw
from engine.model_source import default_model_path
from engine.noise import uniform
from engine.outputs import TokenLogprobs
from engine.sampling_params import SamplingParams
from real_texts import Passages
from speculation import copy, edit, first_difference, prose
from tests import drafters

TEMPERATURE = 0.8
WAYS = ("greedy", "seeded")
# Of a difference of logprobs, and of a distance in the cumulative distribution. A bfloat16 logit of
# 16 to 32 has steps of 0.125, and two of them decide.
NEAR_TIES = {"float32": (1e-3, 1e-3), "bfloat16": (0.25, 0.1)}
NAMES = {
    "wrong": "tests.drafters:AlwaysWrongDrafter",
    "random": "tests.drafters:RandomAcceptanceDrafter",
    "oracle": "tests.drafters:OracleDrafter",
}


@dataclass(slots=True)
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class Verdict:
    """One drafter, one way of drawing."""

    drafter: str
    way: str
    answers: int = 0
    identical: int = 0
    near_ties: int = 0
    different: int = 0  # elsewhere than at a near tie: there must be none
    worst_logprob: float = 0.0  # largest difference of a logprob where the tokens are the same
    logprobs_missing: int = 0  # answers without exactly one logprob per token
    parted: list[dict[str, float]] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


class Distances:
    """How far from another token each seeded draw was, by its noise; a draw's noise is its own."""

    def __init__(self) -> None:
        self.by_noise: dict[float, float] = {}

    def draw(self, logits: FloatRow, params: SamplingParams, noise: float) -> int:
        """In the place of the sampler's own `draw`, for params without filters."""
        token_id = draw(logits, params, noise)
        weights = np.exp((logits - logits.max()).astype(np.float64) / params.temperature)
        ends = np.cumsum(weights)
        low = ends[token_id - 1] if token_id else 0.0
        self.by_noise[noise] = float(min(noise - low / ends[-1], ends[token_id] / ends[-1] - noise))
        return token_id


def prompts_of(num_prompts: int) -> list[str]:
    """Half of them prose, a quarter each to be copied and to be edited."""
    passages, rng = Passages(4), random.Random(4)
    kinds = itertools.cycle((prose, copy, prose, edit))
    questions = [next(kinds)(passages, rng.randrange(30, 90), rng) for _ in range(num_prompts)]
    return [str(question.body["prompt"]) for question in questions]


def params_of(way: str, number: int, max_tokens: int) -> SamplingParams:
    drawn = {"temperature": 0.0} if way == "greedy" else {"temperature": TEMPERATURE}
    return SamplingParams(max_tokens=max_tokens, seed=number, logprobs=2, ignore_eos=True, **drawn)


async def answers_of(
    running: AsyncEngine, prompts: Sequence[Sequence[int]], way: str, options: Any, at_once: int
) -> list[Answer]:
    """One answer per prompt, at most `at_once` of them at a time."""
    places = asyncio.Semaphore(at_once)

    async def one(number: int, prompt: Sequence[int]) -> Answer:
        answer = Answer()
        params = params_of(way, number, options.max_tokens)
        async with places:
            async for output in running.generate(prompt, params, request_id=f"{way}-{number}"):
                if output.error is not None:
                    raise SystemExit(f"{way} {number}: {output.error}")
                answer.token_ids += output.token_ids
                answer.logprobs += output.logprobs or []
        return answer

    return list(await asyncio.gather(*(one(n, prompt) for n, prompt in enumerate(prompts))))


def judge(
    verdict: Verdict,
    plain: Sequence[Answer],
    drafted: Sequence[Answer],
    prompts: Sequence[Sequence[int]],
    distances: Distances,
    near_tie: float,
) -> None:
    for number, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        verdict.answers += 1
        verdict.logprobs_missing += [p.token_id for p in other.logprobs] != other.token_ids
        position = first_difference(one.token_ids, other.token_ids)
        both = zip(one.logprobs[:position], other.logprobs[:position], strict=False)
        worst = max((abs(a.logprob - b.logprob) for a, b in both), default=0.0)
        verdict.worst_logprob = max(verdict.worst_logprob, worst)
        if position is None:
            verdict.identical += 1
            continue
        if verdict.way == "greedy":
            best, second = one.logprobs[position].top[:2]
            distance = best.logprob - second.logprob
        else:
            distance = distances.by_noise[uniform(number, len(prompts[number]) + position)]
        verdict.near_ties += distance <= near_tie
        verdict.different += distance > near_tie
        verdict.parted.append({"prompt": number, "position": position, "distance": distance})


async def run(options: argparse.Namespace, cache_dir: Path) -> list[Verdict]:
    distances = Distances()
    texts = prompts_of(options.num_prompts)
    prompts: list[list[int]] = []
    plain: dict[str, list[Answer]] = {}
    verdicts: list[Verdict] = []
    print(HEADER, flush=True)
    for name in ("off", "off again", *options.drafters):
        spec = "off" if name.startswith("off") else NAMES.get(name, name)
        engine.sampler.draw = distances.draw if name == "off" else draw
        running = await AsyncEngine.from_config(
            EngineConfig(
                model=options.model,
                cache_dir=cache_dir,
                dtype=options.dtype,
                threads=options.threads,
                speculative=spec,
                speculative_tokens=options.speculative_tokens,
                speculative_depth="fixed",  # whether drafts pay is not asked here
                max_num_seqs=options.at_once,
                max_queue=4 * options.num_prompts,
                cpu_tier=0,
                seed=0,
            )
        )
        try:
            prompts = prompts or [running.tokenizer.encode(text) for text in texts]
            at_once = max(1, options.at_once // 4) if name == "off again" else options.at_once
            for way in WAYS:
                drafters.CONTINUATIONS.clear()
                for prompt, answer in zip(prompts, plain.get(way, ()), strict=False):
                    drafters.know(prompt, answer.token_ids)
                before, began = running.stats(), time.perf_counter()
                answers = await answers_of(running, prompts, way, options, at_once)
                if name == "off":
                    plain[way] = answers
                    continue
                verdict = Verdict(name, way, seconds=time.perf_counter() - began)
                after = running.stats()
                verdict.drafted = after.spec_num_draft_tokens - before.spec_num_draft_tokens
                verdict.accepted = after.spec_num_accepted_tokens - before.spec_num_accepted_tokens
                verdict.failures = after.drafter_failures
                near_tie = options.near_tie[WAYS.index(way)]
                judge(verdict, plain[way], answers, prompts, distances, near_tie)
                verdicts.append(verdict)
                print(line(verdict), flush=True)
        finally:
            await running.close()
    return verdicts


HEADER = (
    "drafter          way     answers  identical  near ties (largest)  different  "
    "worst logprob  drafted  accepted  seconds"
)


def line(verdict: Verdict) -> str:
    farthest = max((parted["distance"] for parted in verdict.parted), default=0.0)
    faults = [f"failures {verdict.failures}"] if verdict.failures else []
    if verdict.logprobs_missing:
        faults.append(f"logprobs do not fit the tokens of {verdict.logprobs_missing}")
    return (
        f"{verdict.drafter[-16:]:16} {verdict.way:7} {verdict.answers:7}  {verdict.identical:9}  "
        f"{verdict.near_ties:9} ({farthest:.2g})".ljust(64)
        + f"{verdict.different:9}  {verdict.worst_logprob:13.2g}  {verdict.drafted:7}  "
        f"{verdict.accepted:8}  {verdict.seconds:7.0f}  {'; '.join(faults)}"
    ).rstrip()


def forgive_what_is_not_known() -> None:
    """Where an answer has left the known one, the drafters of the tests have no drafts to give."""
    plain_guess = drafters.OracleDrafter.guess

    def guess(self: drafters.OracleDrafter, context: Any) -> list[int]:
        try:
            return plain_guess(self, context)
        except LookupError:
            return []

    drafters.OracleDrafter.guess = guess  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drafters", default="ngram,wrong,random,oracle", metavar="NAME,NAME")
    parser.add_argument("--draft", action="append", default=[], metavar="DIR", help="a model too")
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--speculative-tokens", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=32, help="requests at a time")
    parser.add_argument("--threads", type=int, help="of each engine (one per core)")
    parser.add_argument("--dtype", default="float32", choices=list(NEAR_TIES))
    parser.add_argument(
        "--near-tie", type=float, nargs=2, metavar=("MARGIN", "DISTANCE"), help="greedy, seeded"
    )
    parser.add_argument("--model", help="a model directory or .gguf file (the default model)")
    parser.add_argument("--cache-dir", type=Path, default=os.environ.get("OVERWINTER_CACHE_DIR"))
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every figure there")
    options = parser.parse_args()
    options.drafters = [name for name in options.drafters.split(",") if name]
    options.drafters += [f"draft:{directory}" for directory in options.draft]
    options.model = options.model or str(default_model_path())
    options.near_tie = options.near_tie or NEAR_TIES[options.dtype]
    forgive_what_is_not_known()
    with tempfile.TemporaryDirectory() as temporary:
        cache_dir = Path(options.cache_dir or temporary)
        verdicts = asyncio.run(run(options, cache_dir))
    if options.json:
        options.json.write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1))
    if any(verdict.different or verdict.logprobs_missing for verdict in verdicts):
        raise SystemExit("some answers differ where no near tie explains it")


if __name__ == "__main__":
    main()
