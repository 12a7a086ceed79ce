"""The speed of speculation over HTTP: two servers side by side, one without and one with drafts.

    python benchmarks/speculation.py                        --speculative ngram against off
    python benchmarks/speculation.py draft:DIR --streams 1 --pairs 5 --json figures.json

    copy     a text, "the same text again" and its first words, after one example of that: raw
             completion, so that the model does copy (the column `copied` says how much of it)
    edit     the same with one word replaced throughout
    chat     the second turn of a chat, which asks for what was said in the first
    prose    a text goes on; greedy, so the model soon repeats itself
    story    the same at temperature 0.8 with a seed: hardly anything repeats

Pairs are interleaved, the order alternates; every request of a pair is the same on both servers and
has a text and a cache salt that no other pair has. The idle server costs nothing. Where the two
greedy answers differ, the margin there is asked for: what the logprobs of the two likeliest tokens
differ by.
Timings on a shared machine wander: quote the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import difflib
import itertools
import json
import random
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from own_server import own_server
from real_texts import Passages, rename

BEGUN = 12  # words of a copy that the prompt already has: with fewer the model goes elsewhere
COUNTERS = {
    "runs": "spec_decode_num_drafts_total",
    "drafted": "spec_decode_num_draft_tokens_total",
    "accepted": "spec_decode_num_accepted_tokens_total",
    "generated": "generation_tokens_total",
}


# --- what is asked ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Question:
    """One request, and what a faithful answer begins with; None where nothing is to be copied."""

    path: str
    body: dict[str, Any]
    expected: str | None = None


def copy(passages: Passages, max_tokens: int, rng: random.Random) -> Question:
    text = passages.take(max_tokens)
    begun, rest = _split(text)
    return _completion(f"Text: {text}\n\nThe same text again: {begun}", rest)


def edit(passages: Passages, max_tokens: int, rng: random.Random) -> Question:
    shot, text = passages.take(40), passages.take(max_tokens)
    parts = []
    for passage in (shot, text):
        old, new, edited = rename(passage, rng)
        parts.append(f"Text: {passage}\n\nThe same text with {new} instead of {old}: ")
        parts.append(f"{edited}\n\n\n")
    begun, rest = _split(edited)
    return _completion("".join(parts[:-1]) + begun, rest)


def _split(text: str) -> tuple[str, str]:
    """The first words, which the answer is made to begin with, and the others."""
    words = text.split()
    return " ".join(words[:BEGUN]), " ".join(words[BEGUN:])


def chat(passages: Passages, max_tokens: int, rng: random.Random) -> Question:
    note, remark = passages.take(max_tokens // 2), passages.take(20)
    messages = [
        {"role": "user", "content": f"Here is a note:\n\n{note}\n\nWhat does the note say?"},
        {"role": "assistant", "content": f"The note says:\n\n{note}"},
        {"role": "user", "content": f"And there is a remark beside it: {remark}"},
        {"role": "assistant", "content": f"The remark says: {remark}"},
        {
            "role": "user",
            "content": "Tell me the note again, word for word, and then explain what it means.",
        },
    ]
    return Question("/v1/chat/completions", {"messages": messages}, f"The note says: {note}")


def prose(passages: Passages, max_tokens: int, rng: random.Random) -> Question:
    return _completion(f"{passages.take(40)}\n\n", None)


def story(passages: Passages, max_tokens: int, rng: random.Random) -> Question:
    question = prose(passages, max_tokens, rng)
    question.body.update(temperature=0.8, seed=rng.getrandbits(32))
    return question


def _completion(prompt: str, expected: str | None) -> Question:
    # What follows a copy is not looked at, but both servers have to go on equally long.
    return Question("/v1/completions", {"prompt": prompt, "ignore_eos": True}, expected)


WORKLOADS = {"copy": copy, "edit": edit, "chat": chat, "prose": prose, "story": story}


# --- asking -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Answer:
    """`arrivals` are the times (perf_counter seconds) and numbers of tokens of its chunks."""

    text: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Round:
    """One batch of requests on one server: its answers and its two speeds, in tokens a second."""

    answers: list[Answer]
    decode: float  # from the first token of the first answer to the last of the last
    whole: float  # from the sending of the requests on


async def ask(client: httpx.AsyncClient, question: Question, **extra: Any) -> Answer:
    """Reads first and parses afterwards: the client runs on the processors of the server."""
    body = {
        "temperature": 0,
        **question.body,
        **extra,
        "stream": True,
        "return_token_ids": True,
    }
    pieces: list[tuple[float, bytes]] = []
    async with client.stream("POST", question.path, json=body) as response:
        async for piece in response.aiter_raw():
            pieces.append((time.perf_counter(), piece))
    if response.status_code != 200:
        raise SystemExit(f"{response.status_code}: {pieces!r}")
    return _parsed(pieces)


def _parsed(pieces: Sequence[tuple[float, bytes]]) -> Answer:
    answer, pending, finished = Answer(), b"", False
    for arrived, piece in pieces:
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise SystemExit(f"error in mid-stream: {event['error']}")
            answer.prompt_ids += event.get("prompt_token_ids") or []
            for choice in event["choices"]:
                answer.prompt_ids += choice.get("prompt_token_ids") or []
                if token_ids := choice.get("token_ids"):
                    answer.token_ids += token_ids
                    answer.arrivals.append((arrived, len(token_ids)))
                answer.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                finished = finished or choice["finish_reason"] is not None
    if not finished or not answer.arrivals:
        raise SystemExit("an answer is incomplete")
    return answer


async def ask_all(
    client: httpx.AsyncClient, questions: Sequence[Question], salt: str, max_tokens: int
) -> Round:
    began = time.perf_counter()
    answers = await asyncio.gather(
        *(
            ask(client, question, cache_salt=f"{salt} {number}", max_tokens=max_tokens)
            for number, question in enumerate(questions)
        )
    )
    first, at_first = min(answer.arrivals[0] for answer in answers)
    last = max(answer.arrivals[-1][0] for answer in answers)
    total = sum(len(answer.token_ids) for answer in answers)
    if last == first:
        raise SystemExit("every answer came in one piece: ask for more tokens")
    return Round(answers, (total - at_first) / (last - first), total / (last - began))


async def counters(client: httpx.AsyncClient) -> dict[str, float]:
    """Running totals of `COUNTERS`; the prefix of the names does not matter."""
    totals = dict.fromkeys(COUNTERS, 0.0)
    for line in (await client.get("/metrics")).text.splitlines():
        name = line.split("{")[0].split()[0].partition(":")[2] if line[:1] not in ("#", "") else ""
        for key, counter in COUNTERS.items():
            if name == counter:
                totals[key] += float(line.split()[-1])
    return totals


async def margin(client: httpx.AsyncClient, prompt_ids: Sequence[int]) -> float:
    """Difference of the two likeliest tokens' logprobs after `prompt_ids`."""
    body = {"prompt": prompt_ids, "max_tokens": 1, "temperature": 0, "logprobs": 2}
    answer = (await client.post("/v1/completions", json=body)).json()
    best, second = sorted(
        answer["choices"][0]["logprobs"]["top_logprobs"][0].values(), reverse=True
    )[:2]
    return float(best - second)


# --- comparing ----------------------------------------------------------------------------------


def copied_share(text: str, expected: str) -> float:
    """Share of the answer's words that stand in runs of three or more of `expected`."""
    said, wanted = text.split(), expected.split()
    blocks = difflib.SequenceMatcher(None, wanted, said, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks if block.size >= 3) / max(1, len(said))


def repeated_share(answer: Answer) -> float:
    """Share of the answer's tokens that an earlier occurrence of the three before them foretells,
    in the prompt or in the answer itself."""
    followers: dict[tuple[int, ...], int] = {}
    tokens = answer.prompt_ids + answer.token_ids
    foretold = 0
    for position in range(3, len(tokens)):
        before = tuple(tokens[position - 3 : position])
        if position >= len(answer.prompt_ids):
            foretold += followers.get(before) == tokens[position]
        followers[before] = tokens[position]
    return foretold / max(1, len(answer.token_ids))


def spread(values: Sequence[float]) -> dict[str, float]:
    quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {"median": statistics.median(values), "q1": quartiles[0], "q3": quartiles[2]}


@dataclass(slots=True)
class Cell:
    """One workload at one number of streams; lists have one entry per pair."""

    workload: str
    streams: int
    off: list[Round] = field(default_factory=list)
    on: list[Round] = field(default_factory=list)
    copied: list[float] = field(default_factory=list)
    repeated: list[float] = field(default_factory=list)
    differences: list[dict[str, float]] = field(default_factory=list)
    counted: dict[str, float] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Plain data for JSON; `per step` means per sequence and pass that yields tokens."""
        steps = self.counted["generated"] - self.counted["accepted"]
        runs = self.counted["runs"]
        return {
            "workload": self.workload,
            "streams": self.streams,
            "pairs": len(self.on),
            "tokens": sum(len(answer.token_ids) for answer in self.on[0].answers),
            "off_decode": spread([r.decode for r in self.off]),
            "on_decode": spread([r.decode for r in self.on]),
            "decode_ratio": spread(self.ratios("decode")),
            "whole_ratio": spread(self.ratios("whole")),
            "decode_ratios": self.ratios("decode"),
            "whole_ratios": self.ratios("whole"),
            "drafts_per_step": self.counted["drafted"] / max(1, steps),
            "accepted_per_step": self.counted["accepted"] / max(1, steps),
            "share_of_steps_with_drafts": runs / max(1, steps),
            "mean_accepted_length": 1 + self.counted["accepted"] / max(1, runs),
            "acceptance": self.counted["accepted"] / max(1, self.counted["drafted"]),
            "copied_share": statistics.mean(self.copied) if self.copied else None,
            "repeated_share": statistics.mean(self.repeated),
            "answers": sum(len(r.answers) for r in self.on),
            "differences": self.differences,
        }

    def ratios(self, speed: str) -> list[float]:
        return [
            getattr(on, speed) / getattr(off, speed)
            for on, off in zip(self.on, self.off, strict=True)
        ]


HEADER = (
    "workload streams   off tok/s    on tok/s  decode ratio [quartiles]  whole ratio [quartiles]"
    "  per step: drafts accepted  acceptance  copied repeated  differ (largest margin)"
)


def line(row: dict[str, Any]) -> str:
    def of(spread: dict[str, float]) -> str:
        return f"{spread['median']:6.2f} [{spread['q1']:5.2f}, {spread['q3']:5.2f}]"

    copied = "   -" if row["copied_share"] is None else f"{row['copied_share']:4.0%}"
    margins = [d["margin"] for d in row["differences"] if "margin" in d]
    differ = f"{len(row['differences'])} of {row['answers']}" + (
        f" ({max(margins):.3f})" if margins else ""
    )
    return (
        f"{row['workload']:8} {row['streams']:7}  {row['off_decode']['median']:10.1f} "
        f"{row['on_decode']['median']:11.1f}  {of(row['decode_ratio']):>24} "
        f"{of(row['whole_ratio']):>24}  {row['drafts_per_step']:16.2f} "
        f"{row['accepted_per_step']:8.2f}  {row['acceptance']:10.0%}  {copied:>6} "
        f"{row['repeated_share']:8.0%}  {differ}"
    )


async def measure(
    cell: Cell,
    servers: dict[str, httpx.AsyncClient],
    passages: Passages,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """All pairs of one cell; the counters cover exactly its requests to the server with drafts."""
    rng = random.Random(f"{options.seed} {cell.workload} {cell.streams}")
    before = await counters(servers["on"])
    for pair in range(options.pairs):
        questions = [
            WORKLOADS[cell.workload](passages, options.max_tokens, rng) for _ in range(cell.streams)
        ]
        salt = f"{cell.workload} {cell.streams} {pair}"
        order = ("off", "on") if pair % 2 else ("on", "off")
        for name in order:
            done = await ask_all(servers[name], questions, salt, options.max_tokens)
            getattr(cell, name).append(done)
        ratio = cell.on[-1].decode / cell.off[-1].decode
        told = (
            f"{salt}: {cell.off[-1].decode:.1f} and {cell.on[-1].decode:.1f} tokens/s, {ratio:.2f}"
        )
        print(told, file=sys.stderr, flush=True)  # minutes lie between two of them
        for question, answer in zip(questions, cell.off[-1].answers, strict=True):
            cell.repeated.append(repeated_share(answer))
            if question.expected is not None:
                cell.copied.append(copied_share(answer.text, question.expected))
    after = await counters(servers["on"])
    cell.counted = {key: after[key] - before[key] for key in COUNTERS}
    for pair, (off, on) in enumerate(zip(cell.off, cell.on, strict=True)):
        for stream, (plain, drafted) in enumerate(zip(off.answers, on.answers, strict=True)):
            if (position := first_difference(plain.token_ids, drafted.token_ids)) is not None:
                ids = plain.prompt_ids + plain.token_ids[:position]
                found: dict[str, float] = {"pair": pair, "stream": stream, "position": position}
                if cell.workload != "story":
                    found["margin"] = await margin(servers["off"], ids)
                cell.differences.append(found)
    return cell.summary()


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two answers part; one may be the beginning of the other."""
    if one == other:
        return None
    shared = itertools.takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False))
    return len(list(shared))


async def run(urls: dict[str, str], options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    passages = Passages(options.seed)
    async with contextlib.AsyncExitStack() as stack:
        servers = {
            name: await stack.enter_async_context(
                httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits())
            )
            for name, url in urls.items()
        }
        rng = random.Random(options.seed)
        for streams in sorted({1, *options.streams}):
            questions = [copy(passages, 60, rng) for _ in range(streams)]
            for client in servers.values():
                await ask_all(client, questions, f"warm {streams}", 60)
        print(HEADER, flush=True)
        for workload in options.workloads:
            for streams in options.streams:
                cell = Cell(workload, streams)
                rows.append(await measure(cell, servers, passages, options))
                print(line(rows[-1]), flush=True)
                if options.show:
                    print(f"    {cell.on[0].answers[0].text[:300]!r}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("spec", nargs="?", default="ngram", help="what --speculative is given")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--streams", type=_list_of(int), default=[1, 8, 32], metavar="N,N")
    parser.add_argument(
        "--workloads", type=_list_of(str), default=list(WORKLOADS), metavar="NAME,NAME"
    )
    parser.add_argument("--max-tokens", type=int, default=200, help="of one answer")
    parser.add_argument("--seed", type=int, default=0, help="of the texts")
    parser.add_argument("--serve", default="", help="more flags of both servers, in one string")
    parser.add_argument("--with", dest="on", default="", help="more flags of the one with drafts")
    parser.add_argument("--port", type=int, default=0, help="of the first server (two free ones)")
    parser.add_argument("--show", action="store_true", help="print the beginning of one answer")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every figure there")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end too
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(f"no workload {', '.join(sorted(unknown))}")
    both = shlex.split(options.serve)
    with (
        own_server([*both, "--speculative", "off"], port=options.port, disk_tier=False) as off,
        own_server(
            [*both, "--speculative", options.spec, *shlex.split(options.on)],
            port=options.port and options.port + 1,
            disk_tier=False,
        ) as on,
    ):
        rows = asyncio.run(run({"off": off, "on": on}, options))
    if options.json:
        options.json.write_text(json.dumps({"command": sys.argv[1:], "cells": rows}, indent=1))


def _list_of(kind: type) -> Any:
    return lambda text: [kind(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
