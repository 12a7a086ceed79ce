"""Time and memory to open a disk tier that holds many small blocks.

    python benchmarks/store_startup.py [--blocks N] [--dir DIR]
    python benchmarks/store_startup.py --servers PAIRS

Fills a directory with N records (sparse files of the right names and sizes: opening looks at names
and `stat` alone) and prints, for an empty store and for this one, the seconds that `DiskTier.open`
takes and the bytes of memory per block that the index keeps. The second opening finds the file
system's own caches warm; drop them between runs for the first.

With `--servers` the stores are of the default model's own blocks, and whole servers are started on
the empty and on the full one in turn, PAIRS times: seconds from the command to ready.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path

import httpx

from offload.block_file import BlockName, record_bytes
from offload.disk_tier import DiskTier
from offload.store_scan import block_name
from offload.tier import BlockHash, BlockKey
from own_server import own_server

BLOCK_BYTES = 4096
FINGERPRINT = hashlib.sha256(b"benchmark").digest()


def fill(root: Path, num_blocks: int, num_bytes: int) -> None:
    """Files of `num_bytes` in `root`, the directory of one fingerprint."""
    for prefix in range(256):
        (root / f"{prefix:02x}").mkdir(parents=True, exist_ok=True)
    parent = hashlib.sha256(b"root").digest()
    tag = parent[:8]
    for _ in range(num_blocks):
        block = BlockHash(hashlib.sha256(parent).digest())
        folder, name = block_name(BlockName(BlockKey(block, 0), tag, parent[:8]))
        fd = os.open(root / folder / name, os.O_CREAT | os.O_WRONLY, 0o600)
        os.ftruncate(fd, num_bytes)
        os.close(fd)
        parent = block


def measure(path: Path) -> tuple[float, int, int]:
    """Seconds, blocks found, and growth of the process in bytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    tier = DiskTier.open(
        path, fingerprint=FINGERPRINT, block_bytes=BLOCK_BYTES, capacity_bytes=1 << 40
    )
    seconds = time.perf_counter() - started
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    blocks = tier.usage().blocks
    tier.close()
    return seconds, blocks, grown * 1024


def start(store: Path) -> tuple[float, int]:
    """Seconds until a server on the store is ready, and the blocks that it says it holds."""
    arguments = ["--disk-tier", str(store), "--disk-tier-size", str(1 << 40)]
    began = time.perf_counter()
    with own_server(arguments) as url:
        seconds = time.perf_counter() - began
        stats = httpx.get(f"{url}/cache/stats").raise_for_status().json()
    return seconds, stats["tiers"]["disk"]["blocks"]


def one_block(store: Path) -> tuple[Path, int]:
    """The directory of the model's blocks, of which the store gets one, and that file's bytes."""
    with own_server(["--disk-tier", str(store)]) as url, httpx.Client(base_url=url) as client:
        body = {"prompt": list(range(100, 117)), "max_tokens": 1}
        client.post("/v1/completions", json=body, timeout=60).raise_for_status()
        client.post("/cache/flush", json={}, timeout=60).raise_for_status()
    (block,) = store.glob("*/??/*")
    return block.parents[1], block.stat().st_size


def compare_starts(folder: Path, num_blocks: int, pairs: int) -> None:
    empty, full = folder / "empty", folder / "full"
    root, num_bytes = one_block(full)
    fill(root, num_blocks, num_bytes)
    start(full)  # what either start finds in the page cache is then the same
    more = []
    for number in range(pairs):
        stores = [empty, full] if number % 2 else [full, empty]
        seconds = {store: start(store) for store in stores}
        # The few that the server reads to learn the disk's speed are empty, and dropped.
        assert seconds[full][1] > 0.99 * num_blocks
        more.append(seconds[full][0] - seconds[empty][0])
        print(f"empty {seconds[empty][0]:.2f} s, {num_blocks} blocks {seconds[full][0]:.2f} s")
    print(f"{statistics.median(more):.2f} s more, {min(more):.2f} to {max(more):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--servers", type=int, metavar="PAIRS")
    arguments = parser.parse_args()
    if arguments.servers:
        with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
            compare_starts(Path(folder), arguments.blocks, arguments.servers)
        return
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        store = Path(folder) / "store"
        empty, _, _ = measure(store)
        size = record_bytes(16, BLOCK_BYTES)
        fill(store / FINGERPRINT.hex(), arguments.blocks, size)
        first, blocks, grown = measure(store)
        second, _, _ = measure(store)
    assert blocks == arguments.blocks
    print(f"empty   {empty:8.3f} s")
    print(f"{blocks} {first:8.3f} s, again {second:.3f} s, {grown / blocks:.0f} bytes a block")


if __name__ == "__main__":
    main()
