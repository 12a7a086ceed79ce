"""Names in the store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offload.block_file import BlockName
from offload.store_scan import (
    Kind,
    block_name,
    find_elsewhere,
    is_outdated_name,
    open_directory,
    parse_block_name,
    remove_tree,
    scan,
)
from offload.tier import BlockHash, BlockKey

HASH = "ab" + "0f" * 31
TAGS = f"{'0a' * 8}.{'b1' * 8}.kv"


@pytest.mark.parametrize("group", [0, 1, 17])
def test_names_are_parsed_as_they_are_made(group: int) -> None:
    key = BlockKey(BlockHash(bytes.fromhex(HASH)), group)
    block = BlockName(key, b"12345678", b"abcdefgh")
    assert block_name(block) == ("ab", f"{HASH}.{group}.3132333435363738.6162636465666768.kv")
    assert parse_block_name(*block_name(block)) == block
    assert not is_outdated_name(*block_name(block))


@pytest.mark.parametrize(
    "name",
    [
        "",
        HASH,
        f"{HASH}.kv",
        f"{HASH}..kv",
        f"{HASH}.0",
        f"{HASH}.0.{TAGS} ",
        f"{HASH}.00.{TAGS}",
        f"{HASH}.-1.{TAGS}",
        f"{HASH}.+1.{TAGS}",
        f"{HASH}.\u0661.{TAGS}",
        f"{HASH.upper()}.0.{TAGS}",
        f"{HASH}.0.{TAGS.upper()}",
        f"{HASH}.0.{TAGS[1:]}",
        f"{HASH}.0.{TAGS[:16]}.kv",
        f"{HASH[:-1]}.0.{TAGS}",
        f"{HASH}0.0.{TAGS}",
        f"{HASH[:30]} {HASH[31:]}.0.{TAGS}",
        f"cd{HASH[2:]}.0.{TAGS}",
        f"x{HASH[1:]}.0.{TAGS}",
    ],
)
def test_other_names_are_no_blocks(name: str) -> None:
    assert parse_block_name("ab", name) is None
    assert not is_outdated_name("ab", name)


def test_names_of_format_1_are_told_from_foreign_ones() -> None:
    assert is_outdated_name("ab", f"{HASH}.3.kv")
    assert parse_block_name("ab", f"{HASH}.3.kv") is None


def test_side_records_are_no_strays(tmp_path: Path) -> None:
    names = {f"{HASH}.side": Kind.SIDE, f"{HASH}.side-wal": Kind.SIDE, "x.side": Kind.FOREIGN}
    for name in names:
        (tmp_path / name).touch()
    dir_fd = os.open(tmp_path, os.O_RDONLY)
    found = {file.path: file for file in scan(dir_fd) if file.kind is not Kind.DIRECTORY}
    os.close(dir_fd)
    assert {name: file.kind for name, file in found.items()} == names
    assert found[f"{HASH}.side"].fingerprint == HASH


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


def test_who_reads_the_directory_meanwhile_takes_no_names_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A survey that missed them would take its blocks for lost."""
    prefix, name = block_name(
        BlockName(BlockKey(BlockHash(bytes.fromhex(HASH)), 0), b"1" * 8, b"2" * 8)
    )
    folder = tmp_path / ("f" * 64) / prefix
    folder.mkdir(parents=True)
    (folder / name).write_bytes(b"x")
    dir_fd = open_directory(str(tmp_path))
    expected = list(scan(dir_fd))
    assert [file.kind for file in expected].count(Kind.BLOCK) == 1
    scandir = os.scandir

    def overtaken(fd: int) -> object:
        entries = scandir(fd)  # nothing is read yet
        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", scandir)
            assert list(scan(dir_fd)) == expected
            assert find_elsewhere(dir_fd, "e" * 64, lambda fingerprint: []) == {}
        return entries

    monkeypatch.setattr(os, "scandir", overtaken)
    assert list(scan(dir_fd)) == expected
    os.close(dir_fd)
