from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.kv_cache import KVCache
from engine.kv_layout import KVLayout
from engine.paged_batch import PagedBatch


def batch(**changes: Any) -> PagedBatch:
    fields: dict[str, Any] = {
        "query_start": torch.tensor([0, 2, 3], dtype=torch.int32),
        "context_len": torch.tensor([5, 4], dtype=torch.int32),
        "block_tables": torch.tensor([[0, 2], [1, -1]], dtype=torch.int32),
        "slot_mapping": torch.tensor([3, 8, 7]),
        "kv": KVCache(3, KVLayout(1, 1, 1, 4, "float32")),
    }
    return PagedBatch(**(fields | changes))


def test_a_well_formed_batch_counts_its_rows() -> None:
    made = batch()
    assert (made.num_rows, made.starts, made.contexts) == (3, [0, 2, 3], [5, 4])


def test_a_batch_of_no_sequences_is_empty() -> None:
    made = batch(
        query_start=torch.zeros(1, dtype=torch.int32),
        context_len=torch.zeros(0, dtype=torch.int32),
        block_tables=torch.zeros(0, 0, dtype=torch.int32),
        slot_mapping=torch.zeros(0, dtype=torch.int64),
    )
    assert made.num_rows == 0


def test_table_entries_behind_the_context_are_free_to_be_anything() -> None:
    batch(block_tables=torch.tensor([[0, 2, 99], [1, 1 << 30, -5]], dtype=torch.int32))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_tables": ints(0, 3, 1, 0).view(2, 2)}, "block outside a pool of 3"),
        ({"block_tables": ints(0, -1, 1, 0).view(2, 2)}, "block outside a pool of 3"),
        ({"block_tables": ints(0, 1).view(2, 1)}, "narrower"),
        ({"block_tables": ints(0, 1).view(1, 2)}, "disagree"),
        ({"block_tables": ints(0, 1)}, "2 dimensions"),
        ({"slot_mapping": torch.tensor([3, 8, 12])}, "slot outside a pool of 3"),
        ({"slot_mapping": torch.tensor([3, -1, 7])}, "slot outside a pool of 3"),
        ({"slot_mapping": torch.tensor([3, 8])}, "number of rows"),
        ({"query_start": ints(1, 2, 3)}, "rise from 0"),
        ({"query_start": ints(0, 4, 3)}, "rise from 0"),
        ({"query_start": ints(0, 3)}, "disagree"),
        ({"context_len": ints(1, 4)}, "context_len"),
    ],
)
def test_a_batch_that_would_reach_outside_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch(**changes)


@pytest.mark.parametrize("name", ["query_start", "context_len", "block_tables", "slot_mapping"])
def test_another_dtype_is_a_type_error(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        batch(**{name: torch.zeros(2, dtype=torch.float32)})
