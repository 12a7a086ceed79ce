"""What the tiers cost and save, measured on a model: one JSON document, nothing asserted.

    python benchmarks/tiers.py ttft        1k to 8k tokens: cold, device, CPU, disk (no page cache)
    python benchmarks/tiers.py throttled   the same from a disk of 10 MB/s, against recomputing
    python benchmarks/tiers.py overhead    throughput with no reuse: tiers on against off, in turn
    python benchmarks/tiers.py stream      a stream's gaps while 6,000 tokens load, and compute
    python benchmarks/tiers.py windows     KV memory of a Gemma-3-shaped model, grouped or not

Engines run in this process. Timings on a shared machine wander: quote the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from acceptance import drop_page_cache
from engine import assembly
from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.model_source import default_model_path
from engine.outputs import CachedTokens
from engine.sampling_params import SamplingParams
from offload.tier import BlockMeta, Entry, Tier

THROTTLED_BYTES_PER_SECOND = 10e6
LENGTHS = (1000, 2000, 4000, 8000)
_ids = iter(range(1 << 30))


class ThrottledTier:
    """A tier whose reads share a fixed bandwidth."""

    def __init__(self, inner: Tier) -> None:
        self._inner = inner
        self._line = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read(self, entry: Entry, into: memoryview) -> BlockMeta:
        with self._line:
            time.sleep(into.nbytes / THROTTLED_BYTES_PER_SECOND)
        return self._inner.read(entry, into)


def config(model: str, cache_dir: Path, **fields: Any) -> EngineConfig:
    return EngineConfig(**{"model": model, "cache_dir": cache_dir, "seed": 0, **fields})


@contextlib.asynccontextmanager
async def engine_of(settings: EngineConfig, throttled: bool = False) -> AsyncIterator[AsyncEngine]:
    plain_open = assembly._open_tiers
    if throttled:
        assembly._open_tiers = lambda *arguments: [  # type: ignore[assignment]
            tier if tier.in_memory else ThrottledTier(tier) for tier in plain_open(*arguments)
        ]
    try:
        engine = await AsyncEngine.from_config(settings)
    finally:
        assembly._open_tiers = plain_open
    try:
        yield engine
    finally:
        await engine.close()


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


async def first_token(
    engine: AsyncEngine, prompt: Sequence[int], salt: str | None = None
) -> tuple[float, CachedTokens]:
    """Seconds to the first token, and what was cached."""
    began = time.perf_counter()
    stream = engine.submit(prompt, params(1), request_id=f"b{next(_ids)}", cache_salt=salt)
    async for output in stream:
        if output.token_ids:
            return time.perf_counter() - began, output.cached
    raise SystemExit("no token came")


def some_tokens(engine: AsyncEngine, length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, engine.model.vocab_size - 100) for _ in range(length)]


async def saved(engine: AsyncEngine) -> None:
    while any(tier.pending_saves for tier in engine.stats().tiers.values()):
        await asyncio.sleep(0.02)


async def ttft(model: str, cache_dir: Path, work: Path) -> dict[str, Any]:
    rows = {}
    async with engine_of(config(model, cache_dir, disk_tier=work / "kv")) as engine:
        await first_token(engine, some_tokens(engine, 200, 9))
        for length in LENGTHS:
            prompt = some_tokens(engine, length, length)
            row: dict[str, float] = {}
            row["cold"], cached = await first_token(engine, prompt)
            assert cached.total == 0
            await saved(engine)
            for name, dropped in (("device", []), ("cpu", ["device"]), ("disk", ["device", "cpu"])):
                if dropped:
                    await engine.cache_reset(dropped)
                if name == "disk":
                    drop_page_cache(work / "kv")
                row[name], cached = await first_token(engine, prompt)
                row[f"{name}_cached"] = getattr(cached, name)
                await saved(engine)
            row["cold_again"], _ = await first_token(engine, prompt, "again")
            await engine.cache_reset()
            rows[length] = row
    return rows


async def throttled(model: str, cache_dir: Path, work: Path) -> dict[str, Any]:
    """The store is filled by one engine and found by the next, whose disk is slow."""
    settings = config(model, cache_dir, disk_tier=work / "kv", cpu_tier=0)
    rows: dict[int, dict[str, Any]] = {length: {} for length in LENGTHS}
    async with engine_of(settings) as engine:
        prompts = {length: some_tokens(engine, length, length) for length in LENGTHS}
        for length, prompt in prompts.items():
            rows[length]["recomputed"] = [(await first_token(engine, prompt))[0]]
        await saved(engine)
    async with engine_of(settings, throttled=True) as engine:
        await first_token(engine, some_tokens(engine, 600, 9), "warm")
        for length, prompt in prompts.items():
            row = rows[length]
            row["throttled"], cached = await first_token(engine, prompt)
            row["cached"] = cached.total
            row["recomputed"].append((await first_token(engine, prompt, "again"))[0])
            row["ratio"] = row["throttled"] / statistics.mean(row["recomputed"])
    return rows


async def overhead(model: str, cache_dir: Path, work: Path) -> dict[str, Any]:
    """Tokens a second of 8 streams, prompts that nobody had before; nine pairs, in turn."""
    off = config(model, cache_dir, cpu_tier=0)
    on = config(model, cache_dir, disk_tier=work / "kv")
    ratios = []
    speeds: dict[str, list[float]] = {"off": [], "on": []}
    async with engine_of(off) as plain, engine_of(on) as tiered:

        async def run(engine: AsyncEngine, seed: int) -> float:
            began = time.perf_counter()

            async def one(number: int) -> None:
                prompt = some_tokens(engine, 192, 100 * seed + number)
                async for _ in engine.generate(prompt, params(48), request_id=f"b{next(_ids)}"):
                    pass

            await asyncio.gather(*(one(number) for number in range(8)))
            return 8 * (192 + 48) / (time.perf_counter() - began)

        for engine in (plain, tiered):
            await run(engine, 999)
        for pair in range(9):
            order = [("off", plain), ("on", tiered)]
            for name, engine in order if pair % 2 else reversed(order):
                speeds[name].append(await run(engine, pair))
            ratios.append(speeds["on"][-1] / speeds["off"][-1])
        saved_blocks = tiered.stats().tiers["disk"].saved_blocks
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "ratios_on_over_off": ratios,
        "median": statistics.median(ratios),
        "quartiles": [quartiles[0], quartiles[2]],
        "tokens_per_second": speeds,
        "blocks_saved_to_disk": saved_blocks,
    }


async def stream(model: str, cache_dir: Path, work: Path) -> dict[str, Any]:
    """Gaps between the tokens of one stream: alone, beside a load of 6,000 tokens, beside computing
    as many."""
    settings = config(model, cache_dir, disk_tier=work / "kv", cpu_tier=0, load_policy="always")
    result: dict[str, Any] = {}
    async with engine_of(settings) as engine:
        prompt = some_tokens(engine, 6000, 1)
        await first_token(engine, prompt)
        await saved(engine)
        await engine.cache_reset(["device"])
        drop_page_cache(work / "kv")
        for name in ("alone", "load", "compute"):
            gaps: list[float] = []
            other: asyncio.Task[tuple[float, CachedTokens]] | None = None
            last = time.perf_counter()
            own = some_tokens(engine, 64, 2)
            number = 0
            async for output in engine.generate(own, params(400), request_id=f"b{next(_ids)}"):
                now = time.perf_counter()
                if output.token_ids and number:
                    gaps.append(now - last)
                last = now
                number += 1
                if number == 20 and name != "alone":
                    salt = None if name == "load" else "compute"
                    other = asyncio.create_task(first_token(engine, prompt, salt))
                if number > 60 and (other is None or other.done()):
                    break
            if other is not None:
                seconds, cached = await other
                result[f"{name}_ttft"], result[f"{name}_cached"] = seconds, cached.total
            tail = sorted(gaps)
            result[name] = {
                "median": statistics.median(gaps),
                "p99": tail[int(0.99 * len(tail))],
                "max": tail[-1],
                "tokens": len(gaps),
            }
    return result


async def windows(model: str, cache_dir: Path, work: Path) -> dict[str, Any]:
    """Gemma 3 1B's layers (22 windows of 512, 4 full) at a small width; weights are random."""
    import torch
    import transformers

    from engine import kv_groups

    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(26)]
    shape = transformers.Gemma3TextConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=26,
        num_attention_heads=4, num_key_value_heads=1, head_dim=32, sliding_window=512,
        layer_types=kinds, max_position_embeddings=32768, query_pre_attn_scalar=32,
    )  # fmt: skip
    torch.manual_seed(0)
    directory = work / "gemma"
    transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.float32).save_pretrained(
        directory
    )
    _any_tokenizer(directory)
    rows: dict[str, Any] = {}
    plain_group = kv_groups.group_layers
    for name in ("with groups", "without"):
        if name == "without":
            assembly.group_layers = lambda kinds, limit: plain_group([None] * len(kinds), limit)  # type: ignore[attr-defined]
        try:
            settings = config(str(directory), cache_dir, kv_memory=1 << 30, cpu_tier=0)
            async with engine_of(settings) as engine:
                pool = engine._core.kv.pool
                block_bytes = engine._parts.block_bytes
                rows[name] = {"largest_request": engine.max_request_tokens}
                for length in (1000, 4000):
                    most = 0
                    async for _ in engine.generate(
                        some_tokens(engine, length, 1), params(16), request_id=f"b{next(_ids)}"
                    ):
                        most = max(most, pool.num_blocks - pool.num_available)
                    rows[name][length] = most * block_bytes
        finally:
            assembly.group_layers = plain_group  # type: ignore[attr-defined]
    rows["share"] = {n: rows["with groups"][n] / rows["without"][n] for n in (1000, 4000)}
    return rows


def _any_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models

    vocabulary = {f"t{i}": i for i in range(512)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="t0")).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}")


RUNS = {
    "ttft": ttft,
    "throttled": throttled,
    "overhead": overhead,
    "stream": stream,
    "windows": windows,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=list(RUNS))
    parser.add_argument("--model", help="a model directory or .gguf file (the default model)")
    parser.add_argument("--cache-dir", type=Path, default=os.environ.get("OVERWINTER_CACHE_DIR"))
    parser.add_argument("--work", type=Path, help="directory for the disk tier (a temporary one)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        cache_dir = Path(arguments.cache_dir or Path(work) / "cache")
        model = arguments.model or str(default_model_path())
        result = asyncio.run(RUNS[arguments.what](model, cache_dir, Path(work)))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
