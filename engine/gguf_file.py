"""Reads what stands before the weights in a GGUF file: metadata and the table of tensors.

    +------+---------+-----------+------------+----------------+--------------+-----+---------+
    | GGUF | version | n_tensors | n_metadata | key, type, val | name, shape, | pad | weights |
    |      | u32     | u64       | u64        | x n_metadata   | type, offset |     |         |
    +------+---------+-----------+------------+----------------+--------------+-----+---------+

The weights themselves are dequantised by transformers. This reader exists because a truncated or
damaged file must be refused by name before minutes of work, and because the package that
transformers reads with takes seconds over a vocabulary that this one reads in a fifth of a second.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import StartupError

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # version 1 counted in 32 bits; nobody writes it any more
DEFAULT_ALIGNMENT = 32

# value type -> struct code; strings are 8, arrays 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One row of the tensor table; `shape` is in torch's order, `offset` from `data_start`."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The decoded head of a file. Strings in `metadata` are text, arrays are lists."""

    path: Path
    architecture: str
    metadata: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]
    data_start: int  # bytes

    @classmethod
    def read(cls, path: Path) -> GGUFHeader:
        """Read and check the head of `path`.

        Raises:
            StartupError: not a GGUF file, or one that is cut off or damaged.
        """
        try:
            with path.open("rb") as file:
                if file.read(len(MAGIC)) != MAGIC:
                    raise StartupError(f"{path} is not a GGUF file; name another one")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
                    return _Cursor(blob).header(path)
        except OSError as error:
            raise StartupError(f"cannot read {path}: {error.strerror}; check the path") from error
        except (struct.error, ValueError, MemoryError, LookupError) as error:
            raise StartupError(
                f"{path} is a damaged or cut-off GGUF file ({error}); download it again"
            ) from error


class _Cursor:
    """A read position in the file's first bytes; every read moves it and is bounds-checked."""

    def __init__(self, blob: mmap.mmap) -> None:
        self.blob = blob
        self.position = 4  # after the magic

    def header(self, path: Path) -> GGUFHeader:
        (version,) = self.unpack("<I")
        if version not in VERSIONS:
            raise StartupError(
                f"{path} is GGUF version {version}, supported are 2 and 3; convert it again"
            )
        tensor_count, metadata_count = self.unpack("<QQ")
        metadata = {}
        for _ in range(metadata_count):
            key = self.string()
            metadata[key] = self.value(self.unpack("<I")[0])
        tensors = tuple(self.tensor() for _ in range(tensor_count))
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        data_start = -(-self.position // alignment) * alignment
        return GGUFHeader(path, metadata["general.architecture"], metadata, tensors, data_start)

    def unpack(self, code: str) -> tuple[Any, ...]:
        values = struct.unpack_from(code, self.blob, self.position)
        self.position += struct.calcsize(code)
        return values

    def string(self) -> str:
        (length,) = self.unpack("<Q")
        end = self.position + length
        if end > len(self.blob):
            raise struct.error(f"a text of {length} bytes reaches past the end")
        text = self.blob[self.position : end].decode("utf-8")
        self.position = end
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.unpack("<" + _SCALARS[kind])[0]
        item_kind, count = self.unpack("<IQ")
        if item_kind in _SCALARS:
            return list(self.unpack(f"<{count}{_SCALARS[item_kind]}"))
        return [self.value(item_kind) for _ in range(count)]

    def tensor(self) -> GGUFTensor:
        name = self.string()
        (rank,) = self.unpack("<I")
        shape = self.unpack(f"<{rank}Q")
        ggml_type, offset = self.unpack("<IQ")
        return GGUFTensor(name, shape[::-1], ggml_type, offset)
