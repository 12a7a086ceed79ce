"""The order in which the torch thread touches the pool: out, in, then the pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.kv_cache import KVCache
from engine.kv_groups import KVGroup
from engine.kv_layout import KVLayout
from engine.model_runner import ModelRunner
from engine.step import SequenceInput, StepInput, StepOutput
from offload.tier import BlockHash, BlockKey
from offload.transfers import CopyIn, CopyOut

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")
KEY = BlockKey(BlockHash(bytes(32)), 0)
OLD, SAVED, LOADED, WRITTEN = 1, 0, 2, 3


class Pool:
    """Two blocks, a runner on them, and a pass that only looks and writes."""

    def __init__(self) -> None:
        self.kv = KVCache(2, LAYOUT)
        self.kv.pool.fill_(OLD)
        self.runner = ModelRunner(torch.nn.Identity(), self.kv, None, 8, [KVGroup(0, None, (0,))])
        self.seen_by_pass: list[int] = []
        self.runner._forward = self.forward  # type: ignore[method-assign]

    def forward(self, sequences: Any) -> StepOutput:
        self.seen_by_pass = [int(self.kv.pool[block, 0]) for block in range(2)]
        self.kv.pool.fill_(WRITTEN)
        return StepOutput()

    def execute(self, **fields: Any) -> StepOutput:
        row = SequenceInput(token_ids=[1], start=0, block_tables=[[0]])
        return self.runner.execute(StepInput(sequences=[row], **fields))


@pytest.fixture
def pool() -> Pool:
    return Pool()


def buffer(value: int = SAVED) -> memoryview:
    return memoryview(bytearray([value]) * LAYOUT.block_bytes)


def test_a_save_reads_its_block_before_a_load_or_a_pass_overwrites_it(pool: Pool) -> None:
    """The pool may hand the block to a load, or to rows of the pass, in the very same step."""
    saved = [buffer(), buffer()]
    pool.execute(
        copies_out=[CopyOut(KEY, 0, (saved[0],)), CopyOut(KEY, 1, (saved[1],))],
        copies_in=[CopyIn(1, KEY, 1, buffer(LOADED))],
    )
    assert [set(view) for view in saved] == [{OLD}, {OLD}]


def test_every_destination_of_a_save_is_filled(pool: Pool) -> None:
    saved = [buffer(), buffer()]
    pool.execute(copies_out=[CopyOut(KEY, 0, tuple(saved))])
    assert [set(view) for view in saved] == [{OLD}, {OLD}]


def test_a_load_lands_before_the_pass_that_reads_it(pool: Pool) -> None:
    pool.execute(copies_in=[CopyIn(1, KEY, 1, buffer(LOADED))])
    assert pool.seen_by_pass == [OLD, LOADED]


def test_a_load_fills_its_own_block_and_no_other(pool: Pool) -> None:
    pool.runner.execute(StepInput(copies_in=[CopyIn(1, KEY, 1, buffer(LOADED))]))
    assert [set(block) for block in pool.kv.pool.tolist()] == [{OLD}, {LOADED}]


def test_copies_are_made_though_the_pass_fails(pool: Pool) -> None:
    """They were handed out, so their owners count on them."""

    def fail(sequences: Any) -> StepOutput:
        raise RuntimeError("planted")

    pool.runner._forward = fail  # type: ignore[method-assign]
    saved = buffer()
    output = pool.execute(
        copies_out=[CopyOut(KEY, 0, (saved,))], copies_in=[CopyIn(1, KEY, 1, buffer(LOADED))]
    )
    assert isinstance(output.error, RuntimeError)
    assert set(saved) == {OLD}
    assert set(pool.kv.pool[1].tolist()) == {LOADED}
