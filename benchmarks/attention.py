"""Time of paged attention for one layer: the kernel against the plain reference, interleaved.

    python benchmarks/attention.py [--cache-dir DIR] [--threads N] [--rounds N]

Prints the best of the rounds in milliseconds, and the kernel's GFLOP/s (two matrix products of
the visible keys) and GB/s (keys and values read once).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine import paged_reference
from engine.kernels import load_kernels
from engine.kv_cache import KVCache
from engine.kv_layout import KVLayout
from engine.paged_batch import PagedBatch

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
LAYERS = 8  # visited in turn, so that a decoding step finds its pages in memory, not in a cache
# name: (rows, context) of each sequence
CASES: dict[str, list[tuple[int, int]]] = {
    "decode 1 x 512": [(1, 512)],
    "decode 1 x 6000": [(1, 6000)],
    "decode 32 x 512": [(1, 512)] * 32,
    "verify 5 rows x 2000": [(5, 2000)],
    "prefill 512 of 512": [(512, 512)],
    "prefill 512 of 6000": [(512, 6000)],
    "mixed 480 of 4000 + 31 x 512": [(480, 4000)] + [(1, 512)] * 31,
}


def make_batch(shapes: list[tuple[int, int]], kernels: object) -> PagedBatch:
    """A batch over random pages of a float32 pool that is just large enough."""
    needed = [-(-context // BLOCK_SIZE) for _, context in shapes]
    layout = KVLayout(LAYERS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, "float32")
    kv = KVCache(sum(needed), layout)
    for layer in range(LAYERS):
        kv.key(layer).normal_()
        kv.value(layer).normal_()
    order = torch.randperm(sum(needed), dtype=torch.int32).split(needed)
    tables = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)
    rows = torch.tensor([rows for rows, _ in shapes], dtype=torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), rows.cumsum(0, dtype=torch.int32)])
    slots = torch.zeros(int(starts[-1]), dtype=torch.int64)
    contexts = torch.tensor([context for _, context in shapes], dtype=torch.int32)
    return PagedBatch(starts, contexts, tables, slots, kv, kernels)  # type: ignore[arg-type]


def best_ms(run: Callable[[int], object], rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for layer in range(LAYERS):
            run(layer)
        best = min(best, (time.perf_counter() - start) / LAYERS)
    return best * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache-dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kernels = load_kernels(args.cache_dir)
    if kernels is None:
        print("error: the kernel could not be built", file=sys.stderr)
        return 2
    print(f"{kernels.variant}, {args.threads} threads; best of {args.rounds}, one layer")
    print(f"{'case':30} {'kernel ms':>10} {'GFLOP/s':>8} {'GB/s':>6} {'reference ms':>13}")
    for name, shapes in CASES.items():
        batch = make_batch(shapes, kernels)
        query = torch.randn(1, NUM_HEADS, batch.num_rows, HEAD_DIM)
        kernel = reference = float("inf")
        for _ in range(args.rounds):
            kernel = min(
                kernel,
                best_ms(
                    lambda layer, q=query, b=batch: kernels.attend(
                        q, b, layer, scaling=0.125, window=None, softcap=None
                    ),
                    2,
                ),
            )
            reference = min(
                reference,
                best_ms(
                    lambda layer, q=query, b=batch: paged_reference.attend(
                        q, b, layer, scaling=0.125, window=None, softcap=None
                    ),
                    1,
                ),
            )
        pairs = sum(rows * (2 * context - rows + 1) // 2 for rows, context in shapes)
        flops = 4 * pairs * NUM_HEADS * HEAD_DIM
        read = sum(context for _, context in shapes) * NUM_KV_HEADS * HEAD_DIM * 2 * 4
        print(
            f"{name:30} {kernel:10.3f} {flops / kernel / 1e6:8.1f} {read / kernel / 1e6:6.1f} "
            f"{reference:13.3f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
