"""What lies in a tier is what a fresh prefill of its tokens computes, slot by slot.

Compared position by position and layer by layer: one bad slot of sixteen drowns in the error of a
whole block. Two computations of one slot differ by the order of summation; a slot of another token,
of a rejected draft or of another block is off by its own size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.async_engine import AsyncEngine
from engine.block_hash import block_hash, root_hash
from offload.tier import BlockKey
from tests import drafters
from tests.running_engine import ask, ask_all, greedy, running_engine, saves_done, seeded

BLOCK_SIZE = 4
TOLERANCE = 1e-3  # relative, of one slot of one layer
PROMPTS = [[3 + (13 * n + 7 * i) % 370 for i in range(9 + 5 * n)] for n in range(6)]
NUM_OUTPUT = 21


def chain(engine: AsyncEngine, token_ids: list[int]) -> list[BlockKey]:
    parent, keys = root_hash(bytes.fromhex(engine.fingerprint)), []
    for start in range(0, len(token_ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
        parent = block_hash(parent, token_ids[start : start + BLOCK_SIZE])
        keys.append(BlockKey(parent, 0))
    return keys


def slots(engine: AsyncEngine, block: Tensor) -> Tensor:
    """One block's bytes as float32 [layer, token, everything of that token]."""
    layout: Any = engine._core._runner._kv.layout
    shape = (layout.num_layers, 2 * layout.num_kv_heads, layout.block_size, layout.head_dim)
    return block.view(torch.float32).reshape(shape).transpose(1, 2).flatten(2)


def stored_blocks(engine: AsyncEngine) -> dict[BlockKey, Tensor]:
    tier: Any = engine._core.offload._lane("cpu").tier
    blocks = {}
    for key in tier.present():
        entry = tier.pin(key)
        blocks[key] = torch.frombuffer(tier.slot(entry), dtype=torch.uint8).clone()
        tier.unpin(entry)
    return blocks


@pytest.mark.parametrize(
    "drafter",
    ["off", "tests.drafters:AlwaysWrongDrafter", "tests.drafters:RandomAcceptanceDrafter"],
)
async def test_stored_blocks_are_those_of_a_fresh_prefill(
    tiny_llama: Path, kernel_cache: Path, drafter: str
) -> None:
    """After chunks, drafts, preemption and loads, in a pool that holds a third of it."""
    async with running_engine(tiny_llama, kernel_cache, kv_blocks=512) as fresh:
        truths = await ask_all(fresh, PROMPTS, seeded(NUM_OUTPUT))
        for prompt, truth in zip(PROMPTS, truths, strict=True):
            drafters.know(prompt, truth.token_ids)
        async with running_engine(
            tiny_llama,
            kernel_cache,
            kv_blocks=24,
            max_num_batched_tokens=16,
            cpu_tier=1 << 20,
            speculative=drafter,
        ) as churned:
            for _ in range(2):
                answers = await ask_all(churned, PROMPTS, seeded(NUM_OUTPUT))
            assert churned.stats().preemptions > 0
            await saves_done(churned)
            stored = stored_blocks(churned)

        pool = fresh._core._runner._kv.pool
        num_compared = 0
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            tokens = [*prompt, *answer.token_ids]
            await fresh.cache_reset()
            await ask(fresh, tokens, greedy(0))
            keys = chain(fresh, tokens)
            whole = (len(tokens) - 1) // BLOCK_SIZE
            assert [key in stored for key in keys] == [i < whole for i in range(len(keys))]
            for key in keys[:whole]:
                block_id = fresh._core.kv.pool.lookup(key)
                assert block_id is not None
                expected = slots(fresh, pool[block_id])
                error = (slots(fresh, stored[key]) - expected).norm(dim=2) / expected.norm(dim=2)
                assert error.max() <= TOLERANCE
                num_compared += 1
        assert num_compared == len(stored)
