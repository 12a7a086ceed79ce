"""Whose blocks may be hit: nobody's of another salt, another model, or another way to compute."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.running_engine import (
    ask,
    ask_all,
    assert_same_answer,
    evict_device,
    greedy,
    running_engine,
    saves_done,
)
from tests.tiny_models import make_tiny_model, settle

PROMPT = [3 + (17 * i) % 370 for i in range(41)]  # ten blocks and one token
BLOCK_BYTES = 3 * 2 * 2 * 4 * 16 * 4  # of the tiny model at four tokens a block
SALTS = [None, "", "a", "b"]
WEIGHTS = "model.safetensors"


@pytest.mark.parametrize("tier", ["device", "cpu", "disk", "restart"])
async def test_a_salt_isolates_every_tier(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path, tier: str
) -> None:
    """Each salt in turn stores the prompt; those that did not, and they alone, find nothing."""
    num_cpu_blocks = 8 if tier == "disk" else 1024
    settings: dict[str, Any] = {
        "cpu_tier": num_cpu_blocks * BLOCK_BYTES,
        "disk_tier": tmp_path / "kv",
        "disk_tier_size": 64 << 20,
    }
    where = "disk" if tier == "restart" else tier
    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        for number, salt in enumerate(SALTS):
            answer = await ask(engine, PROMPT, greedy(3), cache_salt=salt)
            assert answer.cached.total == 0, f"the salt {salt!r} found another's blocks"
            if tier in ("cpu", "disk"):
                await evict_device(engine)
            if tier != "restart":
                again = await ask(engine, PROMPT, greedy(3), cache_salt=salt)
                assert_same_answer(again, answer)
                assert (getattr(again.cached, where), again.cached.total) == (40, 40), number
        await saves_done(engine)
    if tier == "restart":
        async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
            other = await ask(engine, PROMPT, greedy(3), cache_salt="c")
            assert other.cached.total == 0
            for salt in SALTS:
                again = await ask(engine, PROMPT, greedy(3), cache_salt=salt)
                assert_same_answer(again, other)
                assert again.cached.disk == 40


async def test_two_fine_tunes_under_one_name_never_share(
    kernel_cache: Path, tmp_path: Path
) -> None:
    """Same directory, same names and sizes, same time stamps: the weights' content decides."""
    model, other = make_tiny_model(tmp_path / "m"), make_tiny_model(tmp_path / "o", seed=1)
    status = (model / WEIGHTS).stat()
    shutil.copy(model / WEIGHTS, tmp_path / "first")
    assert (other / WEIGHTS).stat().st_size == status.st_size
    settings: dict[str, Any] = {"disk_tier": tmp_path / "kv", "disk_tier_size": 64 << 20}

    async def answer() -> Any:
        settle(model / WEIGHTS)
        async with running_engine(model, kernel_cache, **settings) as engine:
            return await ask(engine, PROMPT, greedy(3))

    def install(weights: Path) -> None:
        shutil.copyfile(weights, model / WEIGHTS)
        os.utime(model / WEIGHTS, ns=(status.st_atime_ns, status.st_mtime_ns))

    first = await answer()
    install(other / WEIGHTS)
    second = await answer()
    assert second.cached.total == 0
    assert second.token_ids != first.token_ids
    install(tmp_path / "first")
    again = await answer()
    assert_same_answer(again, first)
    assert again.cached.disk == 40
    install(other / WEIGHTS)
    once_more = await answer()
    assert_same_answer(once_more, second)
    assert once_more.cached.disk == 40


async def test_whatever_changes_kv_changes_the_fingerprint_and_nothing_else_does(
    kernel_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As served: the model, how it is computed, and how its KV is laid out."""

    async def fingerprint(name: str, seed: int = 0, **fields: Any) -> str:
        overrides = {key: fields.pop(key) for key in ("rope_parameters",) if key in fields}
        model = make_tiny_model(tmp_path / name, seed=seed, **overrides)
        async with running_engine(model, kernel_cache, **fields) as engine:
            return engine.fingerprint

    plain = await fingerprint("plain")
    assert plain == await fingerprint("elsewhere", kv_blocks=32, threads=2, max_num_seqs=2)
    rope = {"rope_type": "default", "rope_theta": 5e3}
    prints = {
        "plain": plain,
        "weights": await fingerprint("weights", seed=1),
        "override": await fingerprint("override", rope_parameters=rope),
        "dtype": await fingerprint("dtype", dtype="bfloat16"),
        "block size": await fingerprint("block size", block_size=8),
    }
    with monkeypatch.context() as patch:
        patch.setattr("engine.assembly.KV_FORMAT_VERSION", 1000)
        prints["format"] = await fingerprint("format")
    with monkeypatch.context() as patch:
        patch.setattr("engine.assembly.KV_LAYOUT_NAME", "another")
        prints["layout"] = await fingerprint("layout")
    assert len(set(prints.values())) == len(prints)


async def test_secrets_stay_in_their_conversations(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path
) -> None:
    """Conversations alike but for a secret, flooded through small tiers: each answer is the one of
    its own secret alone, and no two secrets give the same."""
    rng = random.Random(3)
    head, tail = PROMPT[:12], PROMPT[12:25]
    secrets = [[rng.randrange(3, 380) for _ in range(4)] for _ in range(10)]
    prompts = [[*head, *secret, *tail] for secret in secrets]
    settings: dict[str, Any] = {
        "kv_blocks": 40,
        "cpu_tier": 40 * BLOCK_BYTES,
        "disk_tier": tmp_path / "kv",
        "disk_tier_size": 64 << 20,
    }
    async with running_engine(tiny_llama, kernel_cache, kv_blocks=512) as engine:
        truths = await ask_all(engine, prompts, greedy(4))
    firsts = [truth.logprobs[0].logprob for truth in truths]
    assert len({round(value, 3) for value in firsts}) == len(firsts)
    async with running_engine(tiny_llama, kernel_cache, **settings) as engine:
        for _ in range(4):
            order = rng.sample(range(10), 10)
            answers = await ask_all(engine, [prompts[n] for n in order], greedy(4))
            for number, answer in zip(order, answers, strict=True):
                assert_same_answer(answer, truths[number])
            await saves_done(engine)
        assert all(engine.stats().hit_tokens[tier] for tier in ("device", "cpu", "disk"))
