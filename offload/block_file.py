"""The record of one KV block on disk. Pure: bytes in, bytes out.

     0         8           12             16                48                  80      84
    +---------+-----------+--------------+-----------------+-------------------+-------+---------+
    | magic   | version   | header bytes | fingerprint     | block hash        | group | num ids |
    | 8       | u32       | u32          | 32              | 32                | u32   | u32     |
    +---------+-----------+--------------+-----------------+-------------------+-------+---------+
     88            120         152             160                176               184
    +-------------+-----------+---------------+------------------+-----------------+---------+-----+
    | parent hash | root hash | payload bytes | payload checksum | header checksum | ids     | 0.. |
    | 32          | 32        | u64           | xxh3_128, 16     | xxh3_64, 8      | u32 * n |     |
    +-------------+-----------+---------------+------------------+-----------------+---------+-----+
     header bytes (a multiple of 4096)
    +---------------------------------------------------------------------------------------------+
    | payload                                                                                     |
    +---------------------------------------------------------------------------------------------+

All integers are little-endian. The header checksum covers the whole header, padding included,
except itself; the header holds the payload's checksum and the key, so a record is one unbreakable
piece: no half of it can be exchanged without notice. The root's hash tells whose chain the block
is of, the parent's what it follows. The payload starts on a page, so that it can be read straight
into place.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from offload.tier import BlockHash, BlockKey, BlockMeta, OffloadError

MAGIC = b"OWKVBLK\n"
FORMAT_VERSION = 2
ALIGNMENT = 4096
MAX_HEADER_BYTES = 1 << 20  # 262,000 token ids; more is no block of ours

_FIXED = struct.Struct("<8sII32s32sII32s32sQ16s8s")
_CHECKSUM_AT = 176
_TOKENS_AT = _FIXED.size


class BlockCorruptError(OffloadError):
    """A record is not the whole, undamaged block that was asked for.

    `reason` is one of: size, magic, version, header, payload, fingerprint, key, name.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class BlockName(NamedTuple):
    """What a record's file name says of it; tags are beginnings of hashes, TAG_BYTES long."""

    key: BlockKey
    root_tag: bytes
    parent_tag: bytes


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """A verified header."""

    fingerprint: bytes
    key: BlockKey
    meta: BlockMeta
    header_bytes: int
    payload_bytes: int
    payload_checksum: bytes


def header_bytes(num_tokens: int) -> int:
    """Size of the header of a block of `num_tokens` tokens, a multiple of 4096."""
    return -(-(_TOKENS_AT + 4 * num_tokens) // ALIGNMENT) * ALIGNMENT


def record_bytes(num_tokens: int, payload_bytes: int) -> int:
    """Size of the whole record."""
    return header_bytes(num_tokens) + payload_bytes


def encode_header(
    fingerprint: bytes, key: BlockKey, meta: BlockMeta, payload: memoryview | bytes
) -> bytes:
    """The header that makes `payload` a record. ValueError for hashes that are not 32 bytes."""
    for value in (fingerprint, key.block_hash, meta.parent_hash, meta.root_hash):
        if len(value) != 32:
            raise ValueError(f"a hash of {len(value)} bytes, not 32")
    size = header_bytes(len(meta.token_ids))
    header = bytearray(size)
    _FIXED.pack_into(
        header,
        0,
        MAGIC,
        FORMAT_VERSION,
        size,
        fingerprint,
        key.block_hash,
        key.group,
        len(meta.token_ids),
        meta.parent_hash,
        meta.root_hash,
        memoryview(payload).nbytes,
        xxhash.xxh3_128_digest(payload),
        bytes(8),
    )
    struct.pack_into(f"<{len(meta.token_ids)}I", header, _TOKENS_AT, *meta.token_ids)
    header[_CHECKSUM_AT:_TOKENS_AT] = _header_checksum(header)
    return bytes(header)


def decode_header(header: bytes | bytearray | memoryview) -> BlockHeader:
    """Verify and read a whole header. Raises BlockCorruptError."""
    if len(header) < _FIXED.size:
        raise BlockCorruptError("size", f"{len(header)} bytes hold no header")
    fields = _FIXED.unpack_from(header, 0)
    magic, version, size, fingerprint, block_hash, group, num_tokens = fields[:7]
    parent_hash, root_hash, payload_bytes, payload_checksum, checksum = fields[7:]
    if magic != MAGIC:
        raise BlockCorruptError("magic", f"{magic!r} is not {MAGIC!r}")
    if version != FORMAT_VERSION:
        raise BlockCorruptError("version", f"format {version}, this reader knows {FORMAT_VERSION}")
    if size != len(header) or size != header_bytes(num_tokens):
        raise BlockCorruptError(
            "header", f"{size} bytes for {num_tokens} tokens in a header of {len(header)}"
        )
    if checksum != _header_checksum(header):
        raise BlockCorruptError("header", "checksum differs")
    token_ids = struct.unpack_from(f"<{num_tokens}I", header, _TOKENS_AT)
    return BlockHeader(
        fingerprint=fingerprint,
        key=BlockKey(BlockHash(block_hash), group),
        meta=BlockMeta(BlockHash(parent_hash), token_ids, BlockHash(root_hash)),
        header_bytes=size,
        payload_bytes=payload_bytes,
        payload_checksum=payload_checksum,
    )


def declared_header_bytes(start: bytes) -> int:
    """How long the header that starts with `start` (>= 16 bytes) says it is, within bounds.

    Nothing is verified yet; raises BlockCorruptError where no header can start like this.
    """
    if len(start) < 16:
        raise BlockCorruptError("size", f"{len(start)} bytes hold no header")
    magic, version, size = struct.unpack_from("<8sII", start, 0)
    if magic != MAGIC:
        raise BlockCorruptError("magic", f"{magic!r} is not {MAGIC!r}")
    if version != FORMAT_VERSION:
        raise BlockCorruptError("version", f"format {version}, this reader knows {FORMAT_VERSION}")
    if not ALIGNMENT <= size <= MAX_HEADER_BYTES or size % ALIGNMENT:
        raise BlockCorruptError("header", f"{size} bytes is no header size")
    return int(size)


def verify_header(header: BlockHeader, *, fingerprint: bytes, name: BlockName) -> None:
    """Raise BlockCorruptError unless the record is the one that its name and directory say."""
    if header.fingerprint != fingerprint:
        raise BlockCorruptError("fingerprint", f"written under {header.fingerprint.hex()}")
    if header.key != name.key:
        raise BlockCorruptError("key", f"holds {header.key.block_hash.hex()}.{header.key.group}")
    if (header.meta.root_tag, header.meta.parent_tag) != name[1:]:
        raise BlockCorruptError("name", "of another chain than its record")


def verify(
    header: BlockHeader, payload: memoryview | bytes, *, fingerprint: bytes, name: BlockName
) -> None:
    """Raise BlockCorruptError unless the record is the wanted block and its payload is whole."""
    verify_header(header, fingerprint=fingerprint, name=name)
    if header.payload_bytes != memoryview(payload).nbytes:
        raise BlockCorruptError("size", f"{header.payload_bytes} bytes of payload declared")
    if xxhash.xxh3_128_digest(payload) != header.payload_checksum:
        raise BlockCorruptError("payload", "checksum differs")


def _header_checksum(header: bytes | bytearray | memoryview) -> bytes:
    digest = xxhash.xxh3_64()
    digest.update(memoryview(header)[:_CHECKSUM_AT])
    digest.update(memoryview(header)[_TOKENS_AT:])
    checksum: bytes = digest.digest()
    return checksum
