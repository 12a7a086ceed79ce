"""The kernel, the plain reference and a dense attention written out: one result.

The dense one works on each sequence's own keys and values in float64; what the pages hold beyond
them is NaN, so that one stray read spoils the result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import pytest
import torch

from engine import paged_reference
from engine.kernels import Kernels
from engine.kv_cache import KVCache
from engine.kv_layout import KVLayout
from engine.paged_batch import PagedBatch

LAYER = 1
TOLERANCE = {"float32": 2e-5, "bfloat16": 1.6e-2, "float16": 2e-3}


@dataclass(frozen=True)
class Case:
    shapes: tuple[tuple[int, int], ...]  # (rows of this step, context) of each sequence
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    dtype: str = "float32"
    window: int | None = None
    softcap: float | None = None
    scaling: float = 0.3


@dataclass
class Filled:
    case: Case
    batch: PagedBatch
    query: torch.Tensor  # [1, H, T, D]
    keys: list[torch.Tensor]  # per sequence [context, Hkv, D]
    values: list[torch.Tensor]


def fill(case: Case, seed: int = 0) -> Filled:
    """Pages in random order, NaN wherever no position was written."""
    torch.manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    needed = [-(-context // case.block_size) for _, context in case.shapes]
    layout = KVLayout(2, case.num_kv_heads, case.head_dim, case.block_size, case.dtype)
    kv = KVCache(sum(needed) + 3, layout)
    kv.pool.view(dtype).fill_(float("nan"))
    order = torch.randperm(kv.num_blocks, dtype=torch.int32)
    # Entries behind the context must never be followed.
    tables = torch.full((len(needed), max(needed) + 1), -7, dtype=torch.int32)
    keys, values, slots, taken = [], [], [], 0
    for index, (rows, context) in enumerate(case.shapes):
        blocks = order[taken : taken + needed[index]]
        taken += needed[index]
        tables[index, : len(blocks)] = blocks
        positions = torch.arange(context)
        at = blocks.long()[positions // case.block_size], positions % case.block_size
        pair = [torch.randn(context, case.num_kv_heads, case.head_dim).to(dtype) for _ in "kv"]
        kv.key(LAYER)[at[0], :, at[1]] = pair[0]
        kv.value(LAYER)[at[0], :, at[1]] = pair[1]
        keys.append(pair[0])
        values.append(pair[1])
        slots.append((at[0] * case.block_size + at[1])[context - rows :])
    starts = torch.tensor([0, *(rows for rows, _ in case.shapes)]).cumsum(0).int()
    contexts = torch.tensor([context for _, context in case.shapes], dtype=torch.int32)
    batch = PagedBatch(starts, contexts, tables, torch.cat(slots), kv)
    # As the models hand it over: heads first in shape, rows first in memory.
    query = torch.randn(1, batch.num_rows, case.num_heads, case.head_dim).to(dtype)
    return Filled(case, batch, query.transpose(1, 2), keys, values)


def dense(filled: Filled) -> torch.Tensor:
    """[1, T, H, D] in float64, row by row and head by head, from the definition."""
    case = filled.case
    group = case.num_heads // case.num_kv_heads
    out = torch.empty(1, filled.batch.num_rows, case.num_heads, case.head_dim).double()
    row = 0
    for (rows, context), keys, values in zip(case.shapes, filled.keys, filled.values, strict=True):
        for position in range(context - rows, context):
            start = 0 if case.window is None else max(0, position - case.window + 1)
            for head in range(case.num_heads):
                k = keys[start : position + 1, head // group].double()
                v = values[start : position + 1, head // group].double()
                scores = k @ filled.query[0, head, row].double() * case.scaling
                if case.softcap is not None:
                    scores = case.softcap * torch.tanh(scores / case.softcap)
                out[0, row, head] = scores.softmax(0) @ v
            row += 1
    return out


def run(kernels: Kernels | None, filled: Filled) -> torch.Tensor:
    case = filled.case
    attend = paged_reference.attend if kernels is None else kernels.attend
    return attend(
        filled.query,
        filled.batch,
        LAYER,
        scaling=case.scaling,
        window=case.window,
        softcap=case.softcap,
    )


@cache
def solved(case: Case) -> tuple[Filled, torch.Tensor]:
    """The variants share the work."""
    filled = fill(case)
    return filled, dense(filled)


def check(kernels: Kernels, case: Case, tolerance: float | None = None) -> None:
    filled, expected = solved(case)
    bound = tolerance or TOLERANCE[case.dtype]
    for result in (run(None, filled), run(kernels, filled)):
        assert result.shape == expected.shape
        assert result.dtype == filled.query.dtype
        torch.testing.assert_close(result.double(), expected, atol=bound, rtol=bound)


MIXED = ((1, 70), (5, 5), (1, 1), (7, 33), (40, 131), (0, 9))


@pytest.mark.parametrize("head_dim", [1, 20, 32, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_head_dims_and_dtypes(kernels: Kernels, head_dim: int, dtype: str) -> None:
    check(kernels, Case(((3, 37), (1, 66)), head_dim=head_dim, dtype=dtype, scaling=0.15))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (9, 3), (7, 1), (100, 1)])
def test_ratios_of_query_heads_to_key_heads(kernels: Kernels, heads: int, kv_heads: int) -> None:
    check(kernels, Case(MIXED[:4], num_heads=heads, num_kv_heads=kv_heads))


@pytest.mark.parametrize("block_size", [1, 4, 16, 32, 100])
@pytest.mark.parametrize("window", [None, 1, 7, 64, 1000])
def test_block_sizes_and_windows(kernels: Kernels, block_size: int, window: int | None) -> None:
    check(kernels, Case(MIXED, block_size=block_size, window=window))


@pytest.mark.parametrize("softcap", [2.0, 50.0])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("scaling", [0.05, 3.0])
def test_soft_caps(kernels: Kernels, softcap: float, window: int | None, scaling: float) -> None:
    check(kernels, Case(MIXED, softcap=softcap, window=window, scaling=scaling))


@pytest.mark.parametrize("window", [None, 100])
def test_contexts_of_several_partitions(kernels: Kernels, window: int | None) -> None:
    shapes = ((1, 513), (3, 1027), (2, 512), (50, 1500))
    check(kernels, Case(shapes, num_heads=3, num_kv_heads=1, window=window))


def test_every_residue_of_the_block_and_key_tile(kernels: Kernels) -> None:
    shapes = tuple((1 + context % 3, context) for context in range(3, 70))
    check(kernels, Case(shapes, num_heads=2, num_kv_heads=1))


def test_large_scores_neither_overflow_nor_vanish(kernels: Kernels) -> None:
    # Scores reach some 700, whose own last bit is 6e-5.
    check(kernels, Case(((2, 130),), scaling=40.0), tolerance=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_nan_among_the_keys_in_sight_is_not_hidden(kernels: Kernels, dtype: str) -> None:
    filled = fill(Case(((1, 40),), dtype=dtype))
    slot = int(filled.batch.block_tables[0, 1])
    filled.batch.kv.key(LAYER)[slot, 0, 3, 0] = float("nan")
    for result in (run(None, filled), run(kernels, filled)):
        assert result[0, 0, :2].isnan().all()
        assert result[0, 0, 2:].isfinite().all()


def test_slots_beyond_the_context_and_before_the_window_do_not_leak(kernels: Kernels) -> None:
    """`fill` poisons what no position owns; here also what has slid out of every row's window."""
    filled = fill(Case(((2, 90), (1, 200)), window=30))
    for index, (rows, context) in enumerate(filled.case.shapes):
        gone = (context - rows - 30 + 1) // 16
        blocks = filled.batch.block_tables[index, :gone].long()
        filled.batch.kv.key(LAYER)[blocks] = float("nan")
        filled.batch.kv.value(LAYER)[blocks] = float("nan")
    for result in (run(None, filled), run(kernels, filled)):
        torch.testing.assert_close(result.double(), dense(filled), atol=5e-6, rtol=5e-6)


def test_a_huge_value_out_of_sight_weighs_exactly_nothing(kernels: Kernels) -> None:
    filled = fill(Case(((4, 20),)))
    before = run(kernels, filled)
    last = int(filled.batch.slot_mapping[-1])
    filled.batch.kv.value(LAYER)[last // 16, :, last % 16] = 3e38
    after = run(kernels, filled)
    assert torch.equal(after[0, :3], before[0, :3])
    assert not torch.equal(after[0, 3], before[0, 3])


# ------------------------------------------------------------------ the same bits, whatever else


def part(filled: Filled, index: int, first: int, end: int) -> Filled:
    """Rows [first, end) of sequence `index` alone, as the only rows of a step."""
    batch, start = filled.batch, filled.batch.starts[index]
    rows = batch.starts[index + 1] - start
    alone = PagedBatch(
        torch.tensor([0, end - first], dtype=torch.int32),
        batch.context_len[index : index + 1] - (rows - end),
        batch.block_tables[index : index + 1],
        batch.slot_mapping[start + first : start + end],
        batch.kv,
    )
    return replace(filled, batch=alone, query=filled.query[:, :, start + first : start + end])


@pytest.mark.parametrize("window", [None, 77])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_alone_batched_and_chunked(
    kernels: Kernels, window: int | None, softcap: float | None, dtype: str
) -> None:
    shapes = ((1, 700), (130, 1100), (4, 4), (1, 65))
    filled = fill(Case(shapes, 6, 2, 64, window=window, softcap=softcap, dtype=dtype))
    together = run(kernels, filled)
    for index, (rows, _) in enumerate(shapes):
        start = filled.batch.starts[index]
        for cuts in ([0, rows], [0, 1, rows // 3, rows - 1, rows]):
            for first, end in pairwise(cuts):
                if first < end:
                    alone = run(kernels, part(filled, index, first, end))
                    assert torch.equal(alone[0], together[0, start + first : start + end])


def test_the_number_of_threads_does_not_change_a_bit(kernels: Kernels) -> None:
    filled = fill(Case(((1, 5000), (60, 1300)), 6, 2, 64))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(run(kernels, filled))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


# ------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("by_kernel", [False, True])
def test_rows_are_written_into_their_slots_and_nowhere_else(
    kernels: Kernels, dtype: str, by_kernel: bool
) -> None:
    filled = fill(Case(((3, 20), (1, 33)), block_size=8, dtype=dtype))
    batch = filled.batch
    before = batch.kv.pool.clone()
    torch.manual_seed(1)
    rows = [torch.randn(1, 4, 2, 32).to(batch.kv.dtype).transpose(1, 2) for _ in "kv"]
    (kernels if by_kernel else paged_reference).write_kv(rows[0], rows[1], batch, LAYER)
    expected = KVCache(batch.kv.num_blocks, batch.kv.layout)
    expected.pool.copy_(before)
    for row, slot in enumerate(batch.slot_mapping.tolist()):
        expected.key(LAYER)[slot // 8, :, slot % 8] = rows[0][0, :, row]
        expected.value(LAYER)[slot // 8, :, slot % 8] = rows[1][0, :, row]
    assert torch.equal(batch.kv.pool, expected.pool)
    assert not torch.equal(batch.kv.pool, before)
