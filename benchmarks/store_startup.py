"""Time and memory to open a disk tier that holds many small blocks.

    python benchmarks/store_startup.py [--blocks N] [--dir DIR]

Fills a directory with N records (sparse files of the right names and sizes: opening looks at names
and `stat` alone) and prints, for an empty store and for this one, the seconds that `DiskTier.open`
takes and the bytes of memory per block that the index keeps. The second opening finds the file
system's own caches warm; drop them between runs for the first.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import tempfile
import time
from pathlib import Path

from offload.block_file import BlockName, record_bytes
from offload.disk_tier import DiskTier
from offload.store_scan import block_name
from offload.tier import BlockHash, BlockKey

BLOCK_BYTES = 4096
FINGERPRINT = hashlib.sha256(b"benchmark").digest()


def fill(path: Path, num_blocks: int) -> None:
    root = path / FINGERPRINT.hex()
    for prefix in range(256):
        (root / f"{prefix:02x}").mkdir(parents=True, exist_ok=True)
    parent = hashlib.sha256(b"root").digest()
    tag = parent[:8]
    for _ in range(num_blocks):
        block = BlockHash(hashlib.sha256(parent).digest())
        folder, name = block_name(BlockName(BlockKey(block, 0), tag, parent[:8]))
        fd = os.open(root / folder / name, os.O_CREAT | os.O_WRONLY, 0o600)
        os.ftruncate(fd, record_bytes(16, BLOCK_BYTES))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--dir", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        store = Path(folder) / "store"
        empty, _, _ = measure(store)
        fill(store, arguments.blocks)
        first, blocks, grown = measure(store)
        second, _, _ = measure(store)
    assert blocks == arguments.blocks
    print(f"empty   {empty:8.3f} s")
    print(f"{blocks} {first:8.3f} s, again {second:.3f} s, {grown / blocks:.0f} bytes a block")


if __name__ == "__main__":
    main()
