"""How far a right block may be from the same block computed anew.

Two right computations differ, because matrix products are summed in another order when a pass has
other rows; attention itself does not depend on what shares its pass. What that comes to is measured
at start, on this processor with this model: the same tokens in one pass, and chunked, beside
another sequence and row by row. The threshold is `MARGIN` times the largest error of a slot, at
least `FLOOR` of the type.

SmolLM2-135M on AVX2, largest error of a slot: in float32 3.6e-6 over 64 tokens and 4.8e-6 over 512
(rows one by one, and uneven chunks; what shares a pass changes nothing); in bfloat16 none at all,
because there it is emulated with sums that depend on nothing. Against float32 the bfloat16 KV of
128 tokens is off by up to 0.069, and two machines that round differently may be twice that apart:
hence its floor. The KV of the next token in place of a slot's own is off by 1.2 or more in some
layer, by 0.59 or more within any one layer, and in one head's keys or values of one layer by 0.19
at least and 0.72 as a rule (64 tokens).

The margin is for what so short a calibration cannot see: the tail of many more slots, longer
contexts, blocks that another machine stored.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from engine.errors import StartupError
from engine.model_info import ModelInfo
from engine.model_runner import ModelRunner
from engine.step import AuditInput, BlockPair, SequenceInput

logger = logging.getLogger(__name__)

MARGIN = 16.0
FLOOR = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.03}
CEILING = 0.4  # beyond it a wrong slot may pass
NUM_BLOCKS = 3
NUM_SINGLE_ROWS = 8


def calibrate(runner: ModelRunner, info: ModelInfo, block_size: int, num_blocks: int) -> float:
    """The threshold for `SlotError.error`.

    Uses the pool's first blocks, so it runs before anything else does; a pool that cannot hold a
    block three times gives the floor. Raises StartupError if a pass fails.
    """
    floor = FLOOR[info.dtype]
    most = min(info.max_model_len // block_size, num_blocks // (3 * len(runner.groups)))
    length = min(NUM_BLOCKS, most)
    noise = _noise(runner, info.vocab_size, length, block_size) if length else 0.0
    threshold = max(floor, MARGIN * noise)
    if not threshold <= CEILING:
        logger.warning(
            "KV of the same tokens differs by %.2g between two passes: loads are checked against"
            " %.2g, and one bad slot may pass",
            noise,
            CEILING,
        )
        return CEILING
    return threshold


def _noise(runner: ModelRunner, vocab_size: int, length: int, block_size: int) -> float:
    """The largest error of a slot between `length` blocks in one pass and in other shapes."""
    num_tokens = length * block_size
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, vocab_size, (num_tokens,), generator=generator).tolist()

    def tables(copy: int) -> list[list[int]]:
        """Places for the sequence: 0 in one pass, 1 in another shape, 2 for its neighbour."""
        first = copy * length * len(runner.groups)
        return [
            list(range(first + group.index * length, first + (group.index + 1) * length))
            for group in runner.groups
        ]

    pairs = [
        BlockPair(group.index, *blocks)
        for group in runner.groups
        for blocks in zip(tables(1)[group.index], tables(0)[group.index], strict=True)
    ]
    neighbour = SequenceInput(token_ids[::-1][: num_tokens - 1], 0, tables(2))
    third = -(-num_tokens // 3)
    single = [1] * min(NUM_SINGLE_ROWS, num_tokens - 1)
    shapes: list[tuple[list[int], list[SequenceInput]]] = [
        ([third, 1, num_tokens], []),
        ([num_tokens], [neighbour]),
        ([num_tokens - len(single), *single], []),
    ]
    _run(runner, token_ids, [num_tokens], tables(0), [], [])
    return max(
        _run(runner, token_ids, chunks, tables(1), beside, pairs) for chunks, beside in shapes
    )


def _run(
    runner: ModelRunner,
    token_ids: Sequence[int],
    chunks: Sequence[int],
    tables: Sequence[Sequence[int]],
    beside: Sequence[SequenceInput],
    pairs: Sequence[BlockPair],
) -> float:
    """Compute the sequence in `chunks`, the last of which may be too long; the largest error."""
    start = 0
    for size in chunks:
        rows = token_ids[start : start + size]
        if rows:
            own = SequenceInput(rows, start, tables)
            start += len(rows)
            is_last = start == len(token_ids)
            output = runner.audit(AuditInput([*beside, own], pairs if is_last else ()))
            if output.error is not None:
                raise StartupError(
                    f"cannot calibrate the check of loads: a pass failed ({output.error}); serve"
                    " without --verify-loads"
                ) from output.error
    return max((comparison.worst.error for comparison in output.comparisons), default=0.0)
