"""`--verify-loads`: loaded blocks computed anew in idle time, and what becomes of a bad one."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from engine import load_audit
from engine.async_engine import AsyncEngine
from engine.block_hash import block_hash, root_hash
from offload.block_file import declared_header_bytes, decode_header, encode_header
from offload.tier import BlockHash
from tests import drafters
from tests.running_engine import (
    ask,
    ask_all,
    assert_same_answer,
    evict_device,
    greedy,
    running_engine,
    saves_done,
)
from tests.tiny_models import make_tiny_model

BLOCK_SIZE = 4
NUM_LAYERS, NUM_HEADS, HEAD_DIM = 3, 2, 16  # of the tiny models
PROMPT = [3 + (17 * i) % 370 for i in range(41)]  # ten blocks can be hit
NUM_GROUPS = 3  # of gemma3_text: two of windows and one full, one layer each
BAD = 5  # the block that is tampered with
SALT = "a secret salt"


async def audits_done(engine: AsyncEngine) -> dict[str, int]:
    """Until every block that was drawn is judged; the counts. Conservation holds all the while."""
    auditor = engine._core.auditor
    assert auditor is not None
    async with asyncio.timeout(30):
        while auditor.num_waiting:
            engine._core.check()
            await asyncio.sleep(0.001)
        while any(lane.threads.busy for lane in engine._core.offload._lanes):
            await asyncio.sleep(0.001)
    await saves_done(engine)
    assert await asyncio.to_thread(engine._parts.reporter.wait, 30)
    return engine.stats().load_audits


def chain(engine_fingerprint: str, tokens: Sequence[int], salt: str | None = None) -> list[bytes]:
    """The hashes of the whole blocks of `tokens`."""
    hashes: list[BlockHash] = []
    parent = root_hash(bytes.fromhex(engine_fingerprint), salt)
    for start in range(0, len(tokens) // BLOCK_SIZE * BLOCK_SIZE, BLOCK_SIZE):
        parent = block_hash(parent, tokens[start : start + BLOCK_SIZE])
        hashes.append(parent)
    return hashes


def record_of(store: Path, value: bytes, group: int = 0) -> Path:
    (path,) = store.glob(f"*/*/{value.hex()}.{group}.*")
    return path


def payload_of(path: Path) -> np.ndarray:
    """[layer, key or value, head, slot, dim]; layers that a group lacks are left out by callers."""
    record = path.read_bytes()
    start = declared_header_bytes(record[:16])
    shape = (-1, 2, NUM_HEADS, BLOCK_SIZE, HEAD_DIM)
    return np.frombuffer(record[start:], np.float32).reshape(shape)


def plant_bad_slot(path: Path, layer: int, part: int, head: int, slot: int) -> None:
    """One slot gets another one's content, and the record the checksums of that."""
    record = path.read_bytes()
    header = decode_header(record[: declared_header_bytes(record[:16])])
    payload = payload_of(path).copy()
    payload[layer, part, head, slot] = payload[layer, part, head, (slot + 1) % BLOCK_SIZE]
    data = payload.tobytes()
    path.write_bytes(encode_header(header.fingerprint, header.key, header.meta, data) + data)


@pytest.mark.parametrize(("layer", "part", "head", "slot"), [(0, 1, 0, 0), (2, 0, 1, 3)])
async def test_one_bad_slot_is_found_and_everything_of_it_goes(
    tiny_llama: Path,
    kernel_cache: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    layer: int,
    part: int,
    head: int,
    slot: int,
) -> None:
    store = tmp_path / "kv"
    settings = {"disk_tier": store, "cpu_tier": 1 << 20}
    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        cold = await ask(engine, PROMPT, greedy(6), cache_salt=SALT)
        await ask(engine, PROMPT, greedy(6))  # another chain of the same tokens
        hashes = chain(engine.fingerprint, [*PROMPT, *cold.token_ids], SALT)
        others = chain(engine.fingerprint, [*PROMPT, *cold.token_ids])
    good = payload_of(record_of(store, hashes[BAD])).copy()
    plant_bad_slot(record_of(store, hashes[BAD]), layer, part, head, slot)

    settings |= {"verify_loads": 1.0}
    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        with caplog.at_level(logging.ERROR):
            poisoned = await ask(engine, PROMPT, greedy(6), cache_salt=SALT)
            assert poisoned.cached.disk == 10 * BLOCK_SIZE  # verification did not see it
            counts = await audits_done(engine)
        assert counts == {"passed": BAD, "failed": 1, "skipped": 10 - BAD - 1}
        assert engine.stats().tiers["disk"].verify_failures == 1

        (message,) = [r.getMessage() for r in caplog.records if "quarantined" in r.getMessage()]
        expected = (hashes[BAD].hex(), "group=0", f"index={BAD}", "tier=disk", f"layer={layer}")
        place = (f"part={('key', 'value')[part]}", f"head={head}", f"slot={slot}")
        for words in (*expected, *place, engine.fingerprint, f"root_hash={root_of(engine)}"):
            assert words in message
        assert str(PROMPT[: (BAD + 1) * BLOCK_SIZE]) in message
        assert str(store) in message
        assert SALT not in message
        reported = json.loads(
            (kernel_cache / "quarantine" / f"{hashes[BAD].hex()}.0.json").read_text()
        )
        assert reported["token_ids"] == PROMPT[: (BAD + 1) * BLOCK_SIZE]

        held = {path.name.split(".")[0] for path in store.glob("*/*/*.0.*")}
        for index, value in enumerate(hashes):
            assert (value.hex() in held) == (index < BAD)
        assert {value.hex() for value in others[:10]} <= held

        again = await ask(engine, PROMPT, greedy(6), cache_salt=SALT)
        assert again.cached.total == BAD * BLOCK_SIZE
        assert_same_answer(again, cold)
        await saves_done(engine)
        stored = payload_of(record_of(store, hashes[BAD]))
        np.testing.assert_allclose(stored, good, rtol=0, atol=1e-4)
        await evict_device(engine)
        assert (await ask(engine, PROMPT, greedy(6), cache_salt=SALT)).cached.cpu == 40
        assert (await audits_done(engine))["failed"] == 1

    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        restarted = await ask(engine, PROMPT, greedy(6), cache_salt=SALT)
        assert restarted.cached.disk == 10 * BLOCK_SIZE
        assert_same_answer(restarted, cold)
        assert await audits_done(engine) == {"passed": 10, "failed": 0, "skipped": 0}


def root_of(engine: AsyncEngine) -> str:
    return root_hash(bytes.fromhex(engine.fingerprint), SALT).hex()


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("gemma"), "gemma3_text")


@pytest.mark.parametrize(
    ("family", "drafter"),
    [("llama", "off"), ("gemma3_text", "tests.drafters:AlwaysWrongDrafter")],
)
async def test_a_good_block_is_never_accused(
    tiny_llama: Path, gemma: Path, kernel_cache: Path, tmp_path: Path, family: str, drafter: str
) -> None:
    """Prompts and answers that end at every offset into a block, computed side by side, in chunks
    and beside rejected drafts; read back and computed anew one block at a time."""
    model = tiny_llama if family == "llama" else gemma
    settings = {"kv_blocks": 600, "disk_tier": tmp_path / "kv", "max_num_batched_tokens": 24}
    prompts = [[3 + n, *PROMPT[: 29 + n]] for n in range(BLOCK_SIZE)]
    async with running_engine(model, kernel_cache, kv_blocks=600) as engine:
        truths = await ask_all(engine, prompts, greedy(9))
    for prompt, truth in zip(prompts, truths, strict=True):
        drafters.know(prompt, truth.token_ids)
    settings |= {"speculative": drafter}
    async with running_engine(model, kernel_cache, **settings) as engine:
        await ask_all(engine, prompts, greedy(9))
    async with running_engine(model, kernel_cache, **settings, verify_loads=1.0) as engine:
        for prompt, truth in zip(prompts, truths, strict=True):
            answer = await ask(engine, [*prompt, *truth.token_ids, 5, 6], greedy(0))
            assert answer.cached.disk == (len(prompt) + 8) // BLOCK_SIZE * BLOCK_SIZE
        num_loaded = engine.stats().tiers["disk"].loaded_blocks
        assert num_loaded >= BLOCK_SIZE * 9
        assert await audits_done(engine) == {"passed": num_loaded, "failed": 0, "skipped": 0}


async def test_a_bad_slot_of_a_window_is_found(
    gemma: Path, kernel_cache: Path, tmp_path: Path
) -> None:
    """In the group of the second layer; the blocks of the other groups at its place go too."""
    store = tmp_path / "kv"
    settings = {"kv_blocks": 160, "disk_tier": store}
    async with running_engine(gemma, kernel_cache, **settings) as engine:
        cold = await ask(engine, PROMPT, greedy(1))
        hashes = chain(engine.fingerprint, PROMPT)
    plant_bad_slot(record_of(store, hashes[7], 1), 0, 0, 1, 3)
    async with running_engine(gemma, kernel_cache, **settings, verify_loads=1.0) as engine:
        assert (await ask(engine, PROMPT, greedy(1))).cached.disk == 40
        assert (await audits_done(engine))["failed"] == 1
        assert [path for value in hashes[7:] for path in store.glob(f"*/*/{value.hex()}.*")] == []
        assert len(list(store.glob(f"*/*/{hashes[6].hex()}.*"))) == NUM_GROUPS
        assert_same_answer(await ask(engine, PROMPT, greedy(1)), cold)


async def test_a_prefix_that_was_not_drawn_is_audited_when_what_follows_it_fails(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path
) -> None:
    """Only block 8 is drawn; it was computed right, and from it block 5 is found."""
    settings = {"disk_tier": tmp_path / "kv"}
    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        cold = await ask(engine, PROMPT, greedy(1))
        hashes = chain(engine.fingerprint, PROMPT)
    plant_bad_slot(record_of(tmp_path / "kv", hashes[BAD]), 0, 1, 0, 2)
    async with running_engine(tiny_llama, kernel_cache, **settings, verify_loads=1.0) as engine:
        samples = engine._core.kv.loads._samples
        assert samples is not None
        plain_draw = samples.draw
        samples.draw = lambda request, index, *rest: (  # type: ignore[method-assign]
            plain_draw(request, index, *rest) if index == 8 else None
        )
        await ask(engine, PROMPT, greedy(1))
        assert await audits_done(engine) == {"passed": BAD, "failed": 2, "skipped": 2}
        again = await ask(engine, PROMPT, greedy(1))
        assert again.cached.total == BAD * BLOCK_SIZE
        assert_same_answer(again, cold)


@pytest.mark.parametrize(("fraction", "num_audited"), [(0.5, 5), (1.0, 10)])
async def test_the_share_is_exact_and_repeatable(
    tiny_llama: Path, kernel_cache: Path, fraction: float, num_audited: int
) -> None:
    """Of ten loads the draws of seed 0 leave five below one half."""
    settings = {"cpu_tier": 1 << 20, "verify_loads": fraction, "seed": 0}
    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        await ask(engine, PROMPT, greedy(1))
        await evict_device(engine)
        await ask(engine, PROMPT, greedy(1))
        counts = await audits_done(engine)
        assert counts == {"passed": num_audited, "failed": 0, "skipped": 0}


async def test_nothing_is_audited_unless_asked_for(tiny_llama: Path, kernel_cache: Path) -> None:
    async with running_engine(tiny_llama, kernel_cache, cpu_tier=1 << 20) as engine:
        await ask(engine, PROMPT, greedy(1))
        await evict_device(engine)
        assert (await ask(engine, PROMPT, greedy(1))).cached.cpu == 40
        assert engine._core.auditor is None
        assert engine.stats().load_audits == {}


async def test_a_request_waits_for_one_pass_at_most(
    tiny_llama: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes during the first of an audit's two passes: the next pass is its own."""
    monkeypatch.setattr(load_audit, "MAX_ROWS", BLOCK_SIZE // 2)
    settings = {"cpu_tier": 1 << 20, "verify_loads": 1.0}
    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        await ask(engine, PROMPT, greedy(1))
        await evict_device(engine)
        core, loop = engine._core, asyncio.get_running_loop()
        audit, execute, passes = core._runner.audit, core._runner.execute, []
        late: asyncio.Future[asyncio.Task] = loop.create_future()

        async def submit() -> None:
            late.set_result(loop.create_task(ask(engine, PROMPT[::-1], greedy(1))))
            await asyncio.sleep(0)  # the task runs up to its first wait: it is in the inbox

        def watched_audit(step):
            passes.append("audit")
            if len(passes) == 1:
                asyncio.run_coroutine_threadsafe(submit(), loop).result(30)
            return audit(step)

        def watched_execute(step):
            if late.done() and step.sequences:
                passes.append("request")
                core.check()
            return execute(step)

        core._runner.audit = watched_audit
        core._runner.execute = watched_execute
        await ask(engine, PROMPT, greedy(1))
        answer = await (await late)
        assert answer.cached.total == 0
        assert await audits_done(engine) == {"passed": 10, "failed": 0, "skipped": 0}
        assert passes[:3] == ["audit", "request", "audit"]
        assert len(passes) == 1 + 1 + 2 * 10  # the interrupted one began anew
