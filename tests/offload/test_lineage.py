"""Whom a bad block makes suspect."""

from __future__ import annotations

from pathlib import Path

from offload.cpu_tier import CpuTier
from offload.disk_tier import DiskTier
from offload.lineage import Link, Suspects
from offload.tier import TAG_BYTES, BlockHash, BlockKey, BlockMeta
from tests.offload.harness import BLOCK_BYTES, FINGERPRINT, FaultyTier, Planner, key, root


def hash_of(name: str) -> BlockHash:
    return BlockHash(key(ord(name)).block_hash)


def link(name: str, parent: BlockHash, chain: BlockHash) -> Link:
    return Link(hash_of(name)[:TAG_BYTES], chain[:TAG_BYTES], parent[:TAG_BYTES])


def test_who_follows_a_bad_block_who_may_and_who_cannot() -> None:
    r"""root - a - b - c - d        b is bad; x is held and its parent y is not; z is of another
    \- e - f        y? - x       root."""
    ours, theirs = root(), root("theirs")
    links = [
        link("a", ours, ours),
        link("b", hash_of("a"), ours),
        link("c", hash_of("b"), ours),
        link("d", hash_of("c"), ours),
        link("e", hash_of("a"), ours),
        link("f", hash_of("e"), ours),
        link("x", hash_of("y"), ours),
        link("z", hash_of("y"), theirs),
    ]
    suspects = Suspects(links, hash_of("b"), ours)
    accused = {name for name in "abcdefxz" if hash_of(name) in suspects}
    assert accused == {"b", "c", "d", "x"}
    assert hash_of("q") in suspects  # nobody knows where it belongs


def test_the_first_block_of_a_chain() -> None:
    links = [link("a", root(), root()), link("b", hash_of("a"), root())]
    suspects = Suspects(links, hash_of("a"), root())
    assert hash_of("a") in suspects
    assert hash_of("b") in suspects


def chained(count: int, chain: str = "") -> list[tuple[BlockKey, BlockMeta]]:
    blocks, parent = [], root(chain)
    for number in range(count):
        tokens = (number, number + 1, number + 2, number + 3)
        blocks.append((key(1000 * len(chain) + number), BlockMeta(parent, tokens, root(chain))))
        parent = blocks[-1][0].block_hash
    return blocks


def test_condemned_blocks_leave_every_tier_for_good(tmp_path: Path) -> None:
    """Also one whose save hangs in the disk's thread when it is condemned."""

    def open_disk() -> DiskTier:
        return DiskTier.open(
            tmp_path, fingerprint=FINGERPRINT, block_bytes=BLOCK_BYTES, capacity_bytes=1 << 24
        )

    disk = FaultyTier(open_disk())
    planner = Planner(CpuTier(64 * BLOCK_BYTES, block_bytes=BLOCK_BYTES), disk)
    ours, theirs = chained(6), chained(3, "theirs")
    for number, (held, meta) in enumerate([*ours[:5], *theirs]):
        planner.manager.offer(held, meta, number)
    planner.until(planner.manager.idle)
    disk.hanging.add("write")
    planner.manager.offer(*ours[5], 9)
    planner.until(lambda: "write" in disk.calls[8:])

    suspects, locations = planner.manager.condemn(ours[2][0], root(), "disk")
    assert [held.block_hash in suspects for held, _ in ours] == [False, False] + 4 * [True]
    (location,) = locations
    assert Path(location).name.startswith(ours[2][0].block_hash.hex())
    assert [planner.manager.lookup(held) for held, _ in ours] == ["cpu", "cpu", *4 * [None]]
    stats = planner.manager.stats()
    assert (stats["disk"].verify_failures, stats["cpu"].verify_failures) == (1, 0)
    for held, _ in ours[2:]:  # as the device's owner must
        planner.manager.withdraw(held)
    disk.release.set()
    planner.until(planner.manager.idle)
    planner.until(lambda: not planner.manager._lane("disk").threads.busy)
    planner.manager.check()
    assert not Path(location).exists()
    assert [planner.manager.lookup(held) for held, _ in theirs] == ["cpu"] * 3

    reopened = open_disk()
    held_after = set(reopened.present())
    assert held_after == {held for held, _ in [*ours[:2], *theirs]}
    reopened.close()

    disk.hanging.clear()
    planner.manager.offer(*ours[2], 2)
    planner.until(planner.manager.idle)
    assert planner.manager.lookup(ours[2][0]) == "cpu"
    assert ours[2][0] in set(disk.present())
