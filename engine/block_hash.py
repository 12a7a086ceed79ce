"""Identity of a KV block: a SHA-256 chain from a deterministic root.

    root  = H("root",  fingerprint, salt?, adapter?)
    block = H("block", parent, token ids)

Every part carries a tag and its length, so that no salt can imitate an adapter name and no two
different inputs share an encoding. There is no per-process randomness: a restart must hit.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from offload.tier import BlockHash


def _digest(*parts: tuple[bytes, bytes]) -> bytes:
    hasher = hashlib.sha256()
    for tag, value in parts:
        hasher.update(struct.pack("<B", len(tag)) + tag + struct.pack("<Q", len(value)))
        hasher.update(value)
    return hasher.digest()


def kv_fingerprint(
    model_fingerprint: bytes, *, kv_dtype: str, layout: str, block_size: int, format_version: int
) -> bytes:
    """Everything that decides what a stored block's bytes mean; 32 bytes."""
    return _digest(
        (b"model", model_fingerprint),
        (b"kv_dtype", kv_dtype.encode()),
        (b"layout", layout.encode()),
        (b"block_size", struct.pack("<I", block_size)),
        (b"format", struct.pack("<I", format_version)),
    )


def root_hash(
    fingerprint: bytes, salt: str | None = None, adapter_digest: bytes | None = None
) -> BlockHash:
    """The parent of a sequence's first block. An empty salt differs from no salt."""
    parts = [(b"root", fingerprint)]
    if salt is not None:
        parts.append((b"salt", salt.encode("utf-8", "surrogatepass")))
    if adapter_digest is not None:
        parts.append((b"adapter", adapter_digest))
    return BlockHash(_digest(*parts))


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of the block holding `token_ids` after everything `parent` stands for."""
    tokens = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return BlockHash(_digest((b"block", parent), (b"tokens", tokens)))


def chain_hashes(root: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """The hashes of the whole blocks of a sequence, root first."""
    hashes: list[BlockHash] = []
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = hashes[-1] if hashes else root
        hashes.append(block_hash(parent, token_ids[end - block_size : end]))
    return hashes
