"""Clients that come all at once, leave without a word, or want more than there is.

Faults that serving systems really had. Afterwards a probe is answered and nothing is held.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine import assembly
from engine.async_engine import AsyncEngine
from tests.api.live_server import LiveServer
from tests.offload.harness import FaultyTier
from tests.running_engine import (
    LOGPROB_TOLERANCE,
    ask,
    assert_same_answer,
    engine_config,
    evict_device,
    greedy,
    running_engine,
)

BLOCK_SIZE = 4
NUM_BLOCKS = 32
MAX_NUM_SEQS = 4
ENDLESS = {"prompt": [5, 6, 7], "max_tokens": 120, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server(
    tiny_llama: Path, kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """Four seats and a pool of 128 tokens, above a disk."""
    config = engine_config(
        tiny_llama,
        kernel_cache,
        kv_blocks=NUM_BLOCKS,
        max_num_seqs=MAX_NUM_SEQS,
        max_queue=64,
        disk_tier=tmp_path_factory.mktemp("store"),
        disk_tier_size=64 << 20,
    )
    with LiveServer(config) as live:
        yield live


def connect(server: LiveServer, body: dict[str, Any]) -> socket.socket:
    """A connection on which `body` was posted; nothing of the answer is read."""
    content = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content)
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    connection.sendall(head + content)
    return connection


def reset(connection: socket.socket) -> None:
    """Close with RST: whatever is under way is lost, and nobody says goodbye."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def complete(server: LiveServer, prompt: list[int], max_tokens: int, salt: str | None) -> Any:
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        "cache_salt": salt,
    }
    with server.client() as http:
        response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def complete_at_once(server: LiveServer, prompts: list[list[int]], max_tokens: int) -> list[Any]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        jobs = [pool.submit(complete, server, prompt, max_tokens, None) for prompt in prompts]
        return [job.result() for job in jobs]


def assert_same_choice(answer: Any, truth: Any) -> None:
    ours, theirs = answer["choices"][0], truth["choices"][0]
    assert ours["token_ids"] == theirs["token_ids"]
    pairs = zip(
        ours["logprobs"]["token_logprobs"], theirs["logprobs"]["token_logprobs"], strict=True
    )
    assert max(abs(a - b) for a, b in pairs) <= LOGPROB_TOLERANCE


def assert_nothing_is_held(server: LiveServer) -> None:
    """Nobody runs or waits, no block is referenced, and a probe is answered."""
    server.wait_idle()
    assert server.engine.stats().kv_cache_usage == 0.0
    probe = complete(server, [9, 8, 7], 2, "probe")
    assert probe["usage"]["completion_tokens"] == 2


def test_fifty_that_queued_behind_a_full_house_and_left(server: LiveServer) -> None:
    before = server.engine.stats().finished.get("abort", 0)
    with server.slow_steps():
        seated = [connect(server, ENDLESS) for _ in range(MAX_NUM_SEQS)]
        server.wait_until(lambda: server.num_running == MAX_NUM_SEQS)
        queued = [connect(server, ENDLESS) for _ in range(50)]
        server.wait_until(lambda: server.num_waiting == 50)
        for connection in queued:
            connection.close()
        server.wait_until(lambda: server.num_waiting == 0)
        assert server.num_running == MAX_NUM_SEQS  # those who had a seat keep it
        assert server.engine.stats().finished["abort"] == before + 50
        for connection in seated:
            connection.close()
    assert_nothing_is_held(server)
    assert server.engine.stats().finished["abort"] == before + 50 + MAX_NUM_SEQS


def test_streams_that_are_reset_after_their_first_chunk(server: LiveServer) -> None:
    before = server.engine.stats().finished.get("abort", 0)
    with server.slow_steps():
        connections = [connect(server, ENDLESS) for _ in range(2 * MAX_NUM_SEQS)]
        for connection in connections:  # the second half has a seat once the first has gone
            received = b""
            while b"data:" not in received:
                received += connection.recv(4096)
            reset(connection)
        server.wait_until(lambda: server.num_running == 0)
    assert_nothing_is_held(server)
    assert server.engine.stats().finished["abort"] == before + 2 * MAX_NUM_SEQS


def test_a_plain_client_that_hangs_up_stops_its_generation(server: LiveServer) -> None:
    before = server.engine.stats().finished.get("abort", 0)
    with server.slow_steps():
        connection = connect(server, {**ENDLESS, "stream": False})
        server.wait_until(lambda: server.num_running == 1)
        reset(connection)
        server.wait_until(lambda: server.num_running == 0)
    assert_nothing_is_held(server)
    assert server.engine.stats().finished["abort"] == before + 1


def test_twice_as_many_long_outputs_as_the_pool_holds(server: LiveServer) -> None:
    """Eight times 44 positions in a pool of 128, four at a time: they take turns, and are right."""
    prompts = [[20 + number, 3, 5, 8, 13] for number in range(8)]
    truths = [complete(server, p, 40, f"alone-{i}") for i, p in enumerate(prompts)]
    before = server.engine.stats().preemptions
    for answer, truth in zip(complete_at_once(server, prompts, 40), truths, strict=True):
        assert_same_choice(answer, truth)
    assert server.engine.stats().preemptions > before
    assert_nothing_is_held(server)


def test_twenty_evicted_prompts_come_back_at_once(server: LiveServer) -> None:
    """Together they are more than twice the pool: each waits for its own loads, none for ever."""
    prompts = [[(31 * number + 7 * i) % 370 + 3 for i in range(33)] for number in range(20)]
    truths = [complete(server, prompt, 4, None) for prompt in prompts]
    server.on_loop(evict_device(server.engine))
    answers = complete_at_once(server, prompts, 4)
    for answer, truth in zip(answers, truths, strict=True):
        assert_same_choice(answer, truth)
        details = answer["usage"]["prompt_tokens_details"]
        assert details["cached_tokens_by_tier"] == {"device": 0, "cpu": 0, "disk": 32}
    assert_nothing_is_held(server)


async def test_a_short_prompt_behind_a_very_long_one_waits_a_few_steps(
    tiny_llama: Path, kernel_cache: Path
) -> None:
    """In steps, not seconds: its first token, and the gaps of a stream that runs meanwhile."""
    long, short = [(11 * i) % 370 + 3 for i in range(1200)], [7, 8, 9]
    async with running_engine(
        tiny_llama, kernel_cache, kv_blocks=512, max_num_batched_tokens=32
    ) as engine:
        steps = count_steps(engine)
        stream = engine.submit([4, 5], greedy(500), request_id="stream")
        await anext(stream)
        behind = engine.submit(long, greedy(1), request_id="long")
        while engine.stats().num_running < 2:
            await anext(stream)
        asked = steps[0]
        first = asyncio.ensure_future(ask(engine, short, greedy(1)))
        num_tokens = 0
        while not first.done():
            num_tokens += len((await anext(stream)).token_ids)
        waited = steps[0] - asked
        assert waited <= 4
        assert abs(num_tokens - waited) <= 1  # a token of the stream in every step
        for prompt_step in range(100):
            before = steps[0]
            assert len((await anext(stream)).token_ids) == 1
            assert steps[0] - before <= 1, f"the stream stalled in step {prompt_step}"
        assert engine.stats().num_running == 2  # the long one is still at its prompt
        await stream.aclose()
        assert [output.finish_reason async for output in behind] == ["length"]


def count_steps(engine: AsyncEngine) -> list[int]:
    """One number that grows with every step of the engine."""
    steps, plain_step = [0], engine._core.step

    async def counted() -> bool:
        steps[0] += 1
        return await plain_step()

    engine._core.step = counted  # type: ignore[method-assign]
    return steps


@pytest.mark.parametrize("apart", [0.005, 0.05])
async def test_one_long_prompt_twice_in_short_order_is_loaded_once(
    tiny_llama: Path,
    kernel_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    apart: float,
) -> None:
    """From a cold disk that takes its time: the second comes while the first still loads."""
    prompt = [(13 * i) % 370 + 3 for i in range(161)]  # forty blocks
    disks: list[FaultyTier] = []
    plain_open = assembly._open_tiers

    def open_slow(*arguments: Any) -> list[Any]:
        disks.append(FaultyTier(plain_open(*arguments)[-1]))
        return [disks[-1]]

    monkeypatch.setattr(assembly, "_open_tiers", open_slow)
    settings = {"disk_tier": tmp_path / "kv", "disk_tier_size": 64 << 20, "kv_blocks": 96}
    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        truth = await ask(engine, prompt)
    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        async with asyncio.timeout(30):  # the probes of the start have come back
            while not engine._core.offload.idle():
                await asyncio.sleep(0.005)
        probes = disks[-1].calls.count("read")
        disks[-1].delays = {"read": 0.02}  # forty of them on four threads: a fifth of a second
        first = asyncio.create_task(ask(engine, prompt))
        await asyncio.sleep(apart)
        second = asyncio.create_task(ask(engine, prompt))
        for answer in (await first, await second):
            assert_same_answer(answer, truth)
            assert answer.cached.total == 160
        assert first.result().cached.disk == 160
        assert disks[-1].calls.count("read") - probes == 40
