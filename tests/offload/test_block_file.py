"""Every kind of damage is told from a whole block."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
import xxhash

from offload import block_file
from offload.block_file import BlockCorruptError, BlockName
from offload.record_io import read_record
from offload.tier import BlockHash, BlockKey, BlockMeta
from tests.offload.harness import BLOCK_BYTES, FINGERPRINT, content, key, meta, named, root

WANTED = named(1)


def record(number: int) -> bytearray:
    header = block_file.encode_header(FINGERPRINT, key(number), meta(number), content(number))
    return bytearray(header + content(number))


def read(
    path: Path, raw: bytes, wanted: BlockName = WANTED, fingerprint: bytes = FINGERPRINT
) -> tuple[BlockMeta, bytes]:
    path.write_bytes(raw)
    into = memoryview(bytearray(BLOCK_BYTES))
    fd = os.open(path, os.O_RDONLY)
    try:
        header = read_record(fd, into)
    finally:
        os.close(fd)
    block_file.verify(header, into, fingerprint=fingerprint, name=wanted)
    return header.meta, bytes(into)


def reason(
    path: Path, raw: bytes, wanted: BlockName = WANTED, fingerprint: bytes = FINGERPRINT
) -> str:
    with pytest.raises(BlockCorruptError) as caught:
        read(path, raw, wanted, fingerprint)
    return caught.value.reason


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "block"


def test_a_record_comes_back(path: Path) -> None:
    assert read(path, record(1)) == (meta(1), content(1))


def test_the_layout_is_what_is_drawn() -> None:
    raw = record(1)
    assert raw[:8] == b"OWKVBLK\n"
    assert struct.unpack_from("<II", raw, 8) == (2, 4096)
    assert raw[16:48] == FINGERPRINT
    assert raw[48:80] == key(1).block_hash
    assert struct.unpack_from("<II", raw, 80) == (0, 4)
    assert raw[88:120] == key(0).block_hash
    assert raw[120:152] == root()
    assert struct.unpack_from("<Q", raw, 152) == (BLOCK_BYTES,)
    assert raw[160:176] == xxhash.xxh3_128_digest(content(1))
    assert raw[176:184] == xxhash.xxh3_64_digest(bytes(raw[:176] + raw[184:4096]))
    assert struct.unpack_from("<4I", raw, 184) == (1, 2, 3, 4)
    assert raw[4096:] == content(1)


def test_a_long_header_takes_more_pages(path: Path) -> None:
    assert [block_file.header_bytes(n) for n in (0, 978, 979)] == [4096, 4096, 8192]
    long = BlockMeta(key(0).block_hash, tuple(range(3000)), root())
    raw = block_file.encode_header(FINGERPRINT, key(1), long, content(1)) + content(1)
    assert len(raw) == block_file.record_bytes(3000, BLOCK_BYTES)
    assert read(path, raw) == (long, content(1))


def test_hashes_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="31 bytes"):
        block_file.encode_header(FINGERPRINT[1:], key(1), meta(1), content(1))
    with pytest.raises(ValueError, match="3 bytes"):
        block_file.encode_header(FINGERPRINT, BlockKey(BlockHash(b"abc"), 0), meta(1), b"")


@pytest.mark.parametrize(
    ("offset", "expected"),
    [
        (0, "magic"),
        (7, "magic"),
        (8, "version"),
        (12, "header"),
        (13, "header"),
        (20, "header"),  # fingerprint
        (50, "header"),  # key
        (80, "header"),
        (84, "header"),
        (100, "header"),  # parent
        (130, "header"),  # root
        (153, "header"),
        (170, "header"),
        (180, "header"),  # its own checksum
        (184, "header"),  # a token id
        (4095, "header"),  # padding
        (4096, "payload"),
        (4096 + BLOCK_BYTES // 2, "payload"),
        (4096 + BLOCK_BYTES - 1, "payload"),
    ],
)
@pytest.mark.parametrize("bit", [0, 7])
def test_one_flipped_bit_is_found(path: Path, offset: int, bit: int, expected: str) -> None:
    raw = record(1)
    raw[offset] ^= 1 << bit
    assert reason(path, raw) == expected


@pytest.mark.parametrize("length", [0, 1, 183, 4095, 4096, 4097, 4096 + BLOCK_BYTES - 1])
def test_a_truncated_record_is_found(path: Path, length: int) -> None:
    assert reason(path, record(1)[:length]) in ("size", "header")


def test_a_record_with_a_tail_is_found(path: Path) -> None:
    assert reason(path, record(1) + b"\0") == "header"
    assert reason(path, record(1) + bytes(4096)) == "header"


@pytest.mark.parametrize("page", range(3))
def test_a_zeroed_page_is_found(path: Path, page: int) -> None:
    raw = record(1)
    raw[page * 4096 : (page + 1) * 4096] = bytes(4096)
    assert reason(path, raw) == ("payload" if page else "magic")


def test_anothers_record_is_found(path: Path) -> None:
    assert reason(path, record(2)) == "key"
    assert reason(path, record(1), wanted=WANTED._replace(key=key(1, group=1))) == "key"
    assert reason(path, record(1), fingerprint=b"g" * 32) == "fingerprint"
    for tag in ("root_tag", "parent_tag"):
        assert reason(path, record(1), WANTED._replace(**{tag: b"another!"})) == "name"


def test_halves_of_two_records_do_not_join(path: Path) -> None:
    assert reason(path, record(1)[:4096] + record(2)[4096:]) == "payload"


def test_the_declared_header_size_is_bounded() -> None:
    start = bytes(record(1)[:16])
    assert block_file.declared_header_bytes(start) == 4096
    for size in (0, 100, 4097, (1 << 20) + 4096):
        with pytest.raises(BlockCorruptError, match="no header size"):
            block_file.declared_header_bytes(start[:12] + struct.pack("<I", size))
    with pytest.raises(BlockCorruptError, match="size"):
        block_file.declared_header_bytes(start[:15])
