"""What the engine promises on the real model, measured: one JSON document, nothing asserted.

    python benchmarks/acceptance.py streams      32 streams, each against its answer alone
    python benchmarks/acceptance.py throughput   32 streams against one, tokens a second
    python benchmarks/acceptance.py restart      6,000 tokens: cold, device hit, kill -9, disk hit
    python benchmarks/acceptance.py chats        8 conversations of 6 turns, cached tokens of each
    python benchmarks/acceptance.py text-chats   6 turns of text, kill -9 between, with and without
                                                 the transcripts: cached tokens of each
    python benchmarks/acceptance.py idle         CPU of an idle server, memory after 32 streams

Each starts its own server on a free port with directories of its own and stops it by its process
id. Timings on a shared machine wander: quote the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

NEAR_TIE = 1e-2  # two tokens whose logprobs differ by less may swap with summation order


class Server:
    """`overwinter serve` as a child process."""

    def __init__(self, *arguments: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "api", "serve", "--port", str(self.port), *arguments]
        self.started = time.perf_counter()
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.seconds_to_ready = self._wait_ready()

    def _wait_ready(self) -> float:
        while time.perf_counter() - self.started < 300:
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended with {self.process.returncode}")
            try:
                if httpx.get(f"{self.url}/ready").status_code == 200:
                    return time.perf_counter() - self.started
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise SystemExit("the server did not become ready in 300 s")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=120)

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def pss_mib(self) -> float:
        rollup = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text()
        line = next(line for line in rollup.splitlines() if line.startswith("Pss:"))
        return int(line.split()[1]) / 1024


@dataclass
class Answer:
    ttft: float = 0.0
    seconds: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)  # to the runner-up
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def cached(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def cached_by_tier(self) -> dict[str, int]:
        by_tier: dict[str, int] = self.usage["prompt_tokens_details"]["cached_tokens_by_tier"]
        return by_tier


async def complete(
    client: httpx.AsyncClient, prompt: Sequence[int], max_tokens: int, **extra: Any
) -> Answer:
    body = {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": 2,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **extra,
    }
    answer = Answer()
    began = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"{response.status_code}: {await response.aread()!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise SystemExit(f"error in mid-stream: {event['error']}")
            if event.get("usage"):
                answer.usage = event["usage"]
            for choice in event["choices"]:
                if choice["token_ids"] and not answer.ttft:
                    answer.ttft = time.perf_counter() - began
                answer.token_ids += choice["token_ids"]
                logprobs = choice["logprobs"]
                if logprobs:
                    answer.logprobs += logprobs["token_logprobs"]
                    for top in logprobs["top_logprobs"]:
                        values = sorted(top.values(), reverse=True)
                        answer.margins.append(values[0] - values[1] if len(values) > 1 else 9.9)
    answer.seconds = time.perf_counter() - began
    if len(answer.token_ids) != max_tokens or answer.usage["completion_tokens"] != max_tokens:
        raise SystemExit("an answer is incomplete")
    return answer


def client_for(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=None, limits=httpx.Limits())


async def text_tokens(client: httpx.AsyncClient) -> list[int]:
    """Tokens of real prose: this project's own documents."""
    root = Path(__file__).resolve().parent.parent
    paths = [root / "README.md", *sorted((root / "docs").glob("*.md")), root / "LICENSE"]
    text = "\n".join(path.read_text() for path in paths)
    answer = await client.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
    tokens: list[int] = answer.json()["tokens"]
    return tokens


def cut(tokens: Sequence[int], length: int, rng: random.Random) -> list[int]:
    """`length` tokens from a place of their own; starts differ, so that nothing is shared."""
    start = rng.randrange(max(1, len(tokens) - length))
    piece = [rng.randrange(100, 40_000), *tokens[start : start + length - 1]]
    while len(piece) < length:
        piece += tokens[: length - len(piece)]
    return piece


def compare(alone: Answer, together: Answer) -> dict[str, Any]:
    """Equal tokens up to the first near tie; largest logprob difference up to there."""
    worst = 0.0
    for position, (one, other) in enumerate(zip(alone.token_ids, together.token_ids, strict=True)):
        if one != other:
            return {
                "equal_tokens": position,
                "near_tie": alone.margins[position] < NEAR_TIE,
                "worst": worst,
            }
        worst = max(worst, abs(alone.logprobs[position] - together.logprobs[position]))
    return {"equal_tokens": len(alone.token_ids), "near_tie": None, "worst": worst}


async def streams(work: Path, extra: list[str]) -> dict[str, Any]:
    server = Server("--disk-tier", str(work / "kv"), *extra)
    try:
        async with client_for(server) as client:
            tokens, rng = await text_tokens(client), random.Random(1)
            prompts = [cut(tokens, rng.randrange(16, 256), rng) for _ in range(32)]
            alone = [
                await complete(client, p, 64, cache_salt=f"alone-{i}")
                for i, p in enumerate(prompts)
            ]
            together = await asyncio.gather(
                *(
                    complete(client, p, 64, cache_salt=f"together-{i}")
                    for i, p in enumerate(prompts)
                )
            )
            compared = [compare(a, t) for a, t in zip(alone, together, strict=True)]
        return {
            "seconds_to_ready": server.seconds_to_ready,
            "all_equal": sum(c["near_tie"] is None for c in compared),
            "near_ties": sum(c["near_tie"] is True for c in compared),
            "different": sum(c["near_tie"] is False for c in compared),
            "worst_logprob_difference": max(c["worst"] for c in compared),
        }
    finally:
        server.stop()


async def throughput(work: Path, extra: list[str]) -> dict[str, Any]:
    """Output tokens a second of one stream and of 32 in turn, prompts of 16 to 256 tokens."""
    server = Server("--disk-tier", str(work / "kv"), *extra)
    num_tokens = 128
    ratios, singles, many = [], [], []
    try:
        async with client_for(server) as client:
            tokens, rng = await text_tokens(client), random.Random(4)
            await complete(client, cut(tokens, 64, rng), 8)
            for number in range(3):
                prompt = cut(tokens, 128, rng)
                one = await complete(client, prompt, num_tokens, cache_salt=f"one-{number}")
                singles.append(num_tokens / one.seconds)
                prompts = [cut(tokens, rng.randrange(16, 256), rng) for _ in range(32)]
                began = time.perf_counter()
                await asyncio.gather(
                    *(
                        complete(client, p, num_tokens, cache_salt=f"{number}-{i}")
                        for i, p in enumerate(prompts)
                    )
                )
                many.append(32 * num_tokens / (time.perf_counter() - began))
                ratios.append(many[-1] / singles[-1])
        return {
            "single_stream_tokens_per_second": singles,
            "tokens_per_second_of_32": many,
            "ratios": ratios,
            "median_ratio": statistics.median(ratios),
            "pss_mib": server.pss_mib(),
        }
    finally:
        server.stop()


async def pending_saves_done(client: httpx.AsyncClient) -> float:
    began = time.perf_counter()
    while True:
        tiers = (await client.get("/cache/stats")).json()["tiers"]
        if not any(tier["pending_saves"] for tier in tiers.values()):
            return time.perf_counter() - began
        await asyncio.sleep(0.05)


def drop_page_cache(directory: Path) -> None:
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


async def restart(work: Path, extra: list[str]) -> dict[str, Any]:
    arguments = ["--disk-tier", str(work / "kv"), *extra]
    server = Server(*arguments)
    async with client_for(server) as client:
        tokens = await text_tokens(client)
        prompt = (tokens * (6000 // len(tokens) + 1))[:6000]
        cold = await complete(client, prompt, 32)
        device = await complete(client, prompt, 32)
        waited = await pending_saves_done(client)
    server.kill()
    drop_page_cache(work / "kv")
    server = Server(*arguments)
    try:
        async with client_for(server) as client:
            disk = await complete(client, prompt, 32)
            second_cold = await complete(client, prompt, 32, cache_salt="cold again")
    finally:
        server.stop()
    return {
        "cold_ttft": cold.ttft,
        "device_ttft": device.ttft,
        "device_cached": device.cached,
        "seconds_until_saved": waited,
        "seconds_to_ready_again": server.seconds_to_ready,
        "disk_ttft": disk.ttft,
        "disk_cached_by_tier": disk.cached_by_tier,
        "second_cold_ttft": second_cold.ttft,
        "disk_over_cold": disk.ttft / statistics.mean([cold.ttft, second_cold.ttft]),
        "compared": {
            "device": compare(cold, device),
            "disk": compare(cold, disk),
            "second_cold": compare(cold, second_cold),
        },
    }


async def chats(work: Path, extra: list[str]) -> dict[str, Any]:
    """8 x 6 turns of 150 tokens in and 100 out end at 1,500 tokens each; the pool holds 4,096."""
    arguments = ("--disk-tier", str(work / "kv"), "--kv-blocks", "256", "--load-policy", "always")
    server = Server(*arguments, *extra)
    try:
        async with client_for(server) as client:
            tokens, rng = await text_tokens(client), random.Random(2)
            began = time.perf_counter()

            async def converse(number: int) -> list[dict[str, Any]]:
                history: list[int] = []
                turns = []
                for turn in range(6):
                    committed = max(0, len(history) - 1)
                    prompt = history + cut(tokens, 150, rng)
                    answer = await complete(client, prompt, 100)
                    turns.append(
                        {
                            "turn": turn + 1,
                            "cached": answer.cached,
                            "expected": committed // 16 * 16,
                            "by_tier": answer.cached_by_tier,
                            "ttft": answer.ttft,
                        }
                    )
                    history = prompt + answer.token_ids
                return turns

            conversations = await asyncio.gather(*(converse(number) for number in range(8)))
            seconds = time.perf_counter() - began
        flat = [turn for turns in conversations for turn in turns]
        by_tier = {
            tier: sum(turn["by_tier"][tier] for turn in flat) for tier in ("device", "cpu", "disk")
        }
        return {
            "seconds": seconds,
            "turns": len(flat),
            "exact": sum(turn["cached"] == turn["expected"] for turn in flat),
            "inexact": [turn for turn in flat if turn["cached"] != turn["expected"]],
            "cached_by_tier": by_tier,
            "ttft_by_turn": [
                statistics.median(turns[i]["ttft"] for turns in conversations) for i in range(6)
            ],
        }
    finally:
        server.stop()


QUESTIONS = (
    "Tell me a story about a bee that could not find its hive.",
    "What happened to the bee in the winter?",
    "Who helped it, and why?",
    "Tell me how the story ends.",
    "What should a child learn from it?",
    "Write three titles for the story.",
)


async def text_chats(work: Path, extra: list[str]) -> dict[str, Any]:
    """One conversation of six turns through the OpenAI client at temperature 1, 100 tokens each;
    the server is killed after every turn, once nothing is pending any more."""
    return {
        f"transcripts {switch}": [
            turn async for turn in _text_chat(work / switch, ["--transcript-cache", switch, *extra])
        ]
        for switch in ("on", "off")
    }


async def _text_chat(work: Path, arguments: list[str]) -> AsyncIterator[dict[str, Any]]:
    messages: list[dict[str, str]] = []
    known = 0  # tokens of the turn before
    for number, question in enumerate(QUESTIONS):
        server = Server("--disk-tier", str(work), "--load-policy", "always", *arguments)
        try:
            messages.append({"role": "user", "content": question})
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
                model = (await client.models.list()).data[0].id
                answer = await client.chat.completions.create(
                    model=model,
                    messages=messages,
                    temperature=1.0,
                    seed=number,
                    max_tokens=100,
                )
            (choice,), usage = answer.choices, answer.usage
            messages.append({"role": "assistant", "content": choice.message.content})
            turn = {
                "turn": number + 1,
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "finish_reason": choice.finish_reason,
                "committed_by_the_turn_before": max(0, known - 1) // 16 * 16,
                "cached": usage.prompt_tokens_details.cached_tokens,
            }
            print(json.dumps(turn), file=sys.stderr)  # minutes lie between two of them
            yield turn
            known = usage.prompt_tokens + usage.completion_tokens
            async with client_for(server) as plain:
                await pending_saves_done(plain)
                await _records_written(plain)
        finally:
            server.kill()


async def _records_written(client: httpx.AsyncClient) -> None:
    while True:
        page = (await client.get("/metrics")).text
        line = next(
            line for line in page.splitlines() if line.startswith("vllm:transcript_pending")
        )
        if float(line.split()[-1]) == 0:
            return
        await asyncio.sleep(0.05)


async def idle(work: Path, extra: list[str]) -> dict[str, Any]:
    server = Server("--disk-tier", str(work / "kv"), *extra)
    try:
        async with client_for(server) as client:
            before = server.pss_mib()
            tokens, rng = await text_tokens(client), random.Random(3)
            # 32 x 690 tokens touch all of a pool of 1 GiB at 46 KiB a token.
            await asyncio.gather(*(complete(client, cut(tokens, 658, rng), 32) for i in range(32)))
            await pending_saves_done(client)
            pss = server.pss_mib()
            tiers = (await client.get("/cache/stats")).json()["tiers"]
        await asyncio.sleep(2)
        used, began = server.cpu_seconds(), time.perf_counter()
        await asyncio.sleep(60)
        share = (server.cpu_seconds() - used) / (time.perf_counter() - began)
        return {
            "pss_mib_at_start": before,
            "pss_mib_after_32_streams": pss,
            "bytes_by_tier": {name: tier["bytes"] for name, tier in tiers.items()},
            "idle_cpu_percent": 100 * share,
        }
    finally:
        server.stop()


RUNS = {
    "streams": streams,
    "throughput": throughput,
    "restart": restart,
    "chats": chats,
    "text-chats": text_chats,
    "idle": idle,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=list(RUNS))
    parser.add_argument("--work", type=Path, help="directory for the disk tier (a temporary one)")
    arguments, extra = parser.parse_known_args()
    run = RUNS[arguments.what]
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        print(json.dumps(asyncio.run(run(Path(work), extra)), indent=1))


if __name__ == "__main__":
    main()
