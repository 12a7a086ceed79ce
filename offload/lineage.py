"""Which blocks may have been computed from a bad one: all that cannot be shown not to be.

A block's KV depends on every block before it. So when one is found bad, only blocks of other
chains and those that can be traced to the root without passing it are beyond suspicion. One whose
parents nobody remembers is not: it may follow the bad one through a block that was evicted, and a
prompt that recomputes that one would reach it again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from offload.tier import TAG_BYTES, BlockHash


class Link(NamedTuple):
    """What is known of one block's place in its chain: beginnings of hashes, TAG_BYTES long."""

    tag: bytes
    root_tag: bytes
    parent_tag: bytes


class Suspects:
    """`block_hash in suspects`: whether a block may have been computed from `bad`, a block of the
    chain of `root`, as far as `links` tell. Takes time in proportion to their number."""

    def __init__(self, links: Iterable[Link], bad: BlockHash, root: BlockHash) -> None:
        self._root_tag = root[:TAG_BYTES]
        self._foreign: set[bytes] = set()
        followers: defaultdict[bytes, set[bytes]] = defaultdict(set)
        for link in links:
            if link.root_tag == self._root_tag:
                followers[link.parent_tag].add(link.tag)
            elif link.root_tag:
                self._foreign.add(link.tag)
        bad_tag = bad[:TAG_BYTES]
        self._cleared: set[bytes] = set()
        reached = {self._root_tag}
        while reached:
            reached = {
                follower
                for tag in reached
                for follower in followers.get(tag, ())
                if follower != bad_tag and follower not in self._cleared
            }
            self._cleared |= reached

    def __contains__(self, block_hash: BlockHash) -> bool:
        tag = block_hash[:TAG_BYTES]
        return tag not in self._cleared and tag not in self._foreign
