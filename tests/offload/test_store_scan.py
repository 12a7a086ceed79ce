"""Names in the store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offload.store_scan import Kind, block_name, parse_block_name, remove_tree, scan
from offload.tier import BlockHash, BlockKey

HASH = "ab" + "0f" * 31


@pytest.mark.parametrize("group", [0, 1, 17])
def test_names_are_parsed_as_they_are_made(group: int) -> None:
    key = BlockKey(BlockHash(bytes.fromhex(HASH)), group)
    assert block_name(key) == ("ab", f"{HASH}.{group}.kv")
    assert parse_block_name(*block_name(key)) == key


@pytest.mark.parametrize(
    "name",
    [
        "",
        HASH,
        f"{HASH}.kv",
        f"{HASH}..kv",
        f"{HASH}.0",
        f"{HASH}.0.kv ",
        f"{HASH}.00.kv",
        f"{HASH}.-1.kv",
        f"{HASH}.+1.kv",
        f"{HASH}.\u0661.kv",
        f"{HASH.upper()}.0.kv",
        f"{HASH[:-1]}.0.kv",
        f"{HASH}0.0.kv",
        f"{HASH[:30]} {HASH[31:]}.0.kv",
        f"cd{HASH[2:]}.0.kv",
        f"x{HASH[1:]}.0.kv",
    ],
)
def test_other_names_are_no_blocks(name: str) -> None:
    assert parse_block_name("ab", name) is None


def test_a_tree_is_removed_without_following_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "folder" / "file").touch()
    trash = tmp_path / "store" / ".trash.1"
    (trash / "ab").mkdir(parents=True)
    (trash / "ab" / "block").touch()
    (trash / "ab" / "link").symlink_to(outside)
    dir_fd = os.open(tmp_path / "store", os.O_RDONLY)
    kinds = {file.path: file.kind for file in scan(dir_fd)}
    assert kinds[".trash.1/ab/block"] is Kind.TRASH
    assert not any("folder" in path for path in kinds)
    remove_tree(dir_fd, ".trash.1")
    remove_tree(dir_fd, ".trash.1")  # gone already: another server was faster
    os.close(dir_fd)
    assert not trash.exists()
    assert (outside / "folder" / "file").exists()
