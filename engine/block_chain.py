"""The identity of a request's blocks: its chain of hashes, extended as tokens become known."""

from __future__ import annotations

from engine.block_hash import block_hash
from engine.request import Request
from offload.tier import BlockHash, BlockMeta


def hash_at(request: Request, index: int, block_size: int) -> BlockHash:
    """The chained hash of block `index`; its tokens must be known."""
    hashes = request.block_hashes
    while len(hashes) <= index:
        parent = hashes[-1] if hashes else request.root_hash
        hashes.append(block_hash(parent, _tokens(request, len(hashes), block_size)))
    return hashes[index]


def meta_at(request: Request, index: int, block_size: int) -> BlockMeta:
    """What block `index`, hashed before, claims to hold."""
    parent = request.block_hashes[index - 1] if index else request.root_hash
    return BlockMeta(parent, tuple(_tokens(request, index, block_size)), request.root_hash)


def _tokens(request: Request, index: int, block_size: int) -> list[int]:
    start = index * block_size
    tokens = request.token_ids[start : start + block_size]
    assert len(tokens) == block_size, "a block is hashed only when its tokens are known"
    return tokens
