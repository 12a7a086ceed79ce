"""`overwinter bench`: multi-turn load on a running server, every answer checked."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import sys
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from tqdm import tqdm

from api.cli.bench_client import Measured, Target, measure
from api.cli.bench_report import Report, as_json
from api.cli.client import base_url, describe, error_message, headers
from api.cli.errors import EXIT_FAILURE, CommandError, UsageError

# Every tokenizer turns these into plain text tokens, never into special ones.
VOCABULARY_TEXT = (
    "winter river stone garden music window letter summer forest table silver morning paper "
    "bridge market doctor yellow engine island story mountain animal number circle travel "
    "kitchen people season minute energy nature village teacher weather history picture 0 1 2 3 "
    "4 5 6 7 8 9 , . ; : ! ?"
)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """One run. A conversation is `turns` requests, each carrying the ids of all before it."""

    url: str
    model: str | None = None
    concurrency: int = 8
    num_requests: int = 32
    input_tokens: int = 128
    output_tokens: int = 64
    turns: int = 1
    seed: int = 0
    cache_salt: str | None = None
    json_path: Path | None = None
    api_key: str | None = None

    def __post_init__(self) -> None:
        for name in ("concurrency", "num_requests", "input_tokens", "output_tokens", "turns"):
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise UsageError(f"--{flag} takes a whole number from 1 up")


@dataclass(frozen=True, slots=True)
class Server:
    """What a run needs to know of the server."""

    model: str
    vocabulary: tuple[int, ...]  # ordinary token ids to build prompts from


def bench(options: BenchOptions) -> int:
    """Runs the load, prints a table, writes the JSON; 1 if any answer was not whole."""
    requests, report = asyncio.run(run_load(options))
    print(report.table())
    for message, count in report.errors.items():
        print(f"{count} failed: {message}", file=sys.stderr)
    if options.json_path is not None:
        settings = dataclasses.asdict(options) | {"json_path": None, "api_key": None}
        text = json.dumps(as_json(report, settings, requests), indent=1)
        try:
            options.json_path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise CommandError(
                f"--json {options.json_path} cannot be written: {error.strerror}"
            ) from error
    return EXIT_FAILURE if report.failed else 0


async def run_load(options: BenchOptions) -> tuple[list[Measured], Report]:
    """All requests of a run, `concurrency` conversations at once.

    Raises `CommandError` if the server cannot be asked for its model. Cancellation closes all
    connections.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=options.concurrency)
    try:
        client = httpx.AsyncClient(
            base_url=base_url(options.url),
            headers=headers(options.api_key),
            timeout=httpx.Timeout(10.0, read=None, pool=None),
            limits=limits,
        )
    except httpx.InvalidURL as error:
        raise CommandError(describe(error, options.url)) from error
    async with client:
        try:
            server = await _ask_server(client, options)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CommandError(describe(error, options.url)) from error
        return await _run_conversations(client, server, options)


async def _run_conversations(
    client: httpx.AsyncClient, server: Server, options: BenchOptions
) -> tuple[list[Measured], Report]:
    salt = options.cache_salt or f"bench-{uuid.uuid4().hex}"
    target = Target(options.url, server.model, options.output_tokens, salt)
    waiting = list(reversed(_plan(options)))
    requests: list[Measured] = []

    with tqdm(total=options.num_requests, unit="req", disable=not sys.stderr.isatty()) as bar:

        async def worker() -> None:
            while waiting:
                number, turns = waiting.pop()
                conversation = converse(client, target, server, options, number, turns)
                async for measured in conversation:
                    requests.append(measured)
                    bar.update()

        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(options.concurrency):
                group.create_task(worker())
        seconds = time.perf_counter() - started
    requests.sort(key=lambda measured: (measured.conversation, measured.turn))
    return requests, Report.of(requests, seconds)


def _plan(options: BenchOptions) -> list[tuple[int, int]]:
    """(number, turns) of each conversation; the last one may be shorter."""
    conversations: list[tuple[int, int]] = []
    left = options.num_requests
    while left > 0:
        conversations.append((len(conversations), min(options.turns, left)))
        left -= options.turns
    return conversations


async def converse(
    client: httpx.AsyncClient,
    target: Target,
    server: Server,
    options: BenchOptions,
    number: int,
    turns: int,
) -> AsyncIterator[Measured]:
    """The turns of one conversation, by token ids, as they end. A failed turn fails the ones that
    would build on it."""
    generator = random.Random(f"{options.seed}/{number}")
    history: list[int] = []
    failure: str | None = None
    for turn in range(turns):
        history += generator.choices(server.vocabulary, k=options.input_tokens)
        measured = Measured(number, turn, len(history))
        if failure is None:
            group = f"{target.cache_salt}/{number}"
            await measure(client, target, history, measured, group)
            failure = measured.error and "an earlier turn failed"
            history += measured.token_ids
        else:
            measured.error = failure
        yield measured


async def _ask_server(client: httpx.AsyncClient, options: BenchOptions) -> Server:
    model = options.model
    if model is None:
        response = await client.get("/v1/models")
        if response.status_code != 200:
            raise CommandError(error_message(response.status_code, response.content))
        served: Sequence[dict[str, str]] = response.json().get("data") or []
        if not served:
            raise CommandError("the server lists no model: give --model")
        model = served[0]["id"]
    body = {"model": model, "prompt": VOCABULARY_TEXT, "add_special_tokens": False}
    response = await client.post("/tokenize", json=body)
    if response.status_code != 200:
        raise CommandError(error_message(response.status_code, response.content))
    return Server(model, tuple(sorted(set(response.json()["tokens"]))))
