"""The head of a GGUF is read exactly, and damage anywhere in it is one clear error."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from engine.errors import StartupError
from engine.gguf_file import GGUFHeader, GGUFTensor
from tests.smollm2 import smollm2_gguf


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def head() -> bytes:
    fields = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("general.alignment") + struct.pack("<II", 4, 64),
        text("eps") + struct.pack("<If", 6, 0.5),
        text("flag") + struct.pack("<I?", 7, True),
        text("words") + struct.pack("<IIQ", 9, 8, 2) + text("é") + text(""),
        text("numbers") + struct.pack("<IIQ3i", 9, 5, 3, -1, 0, 7),
    ]
    tensor = text("blk.0.w") + struct.pack("<IQQIQ", 2, 32, 4, 8, 128)
    return b"GGUF" + struct.pack("<IQQ", 3, 1, len(fields)) + b"".join(fields) + tensor


def test_every_kind_of_value(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(head() + bytes(500))
    header = GGUFHeader.read(path)
    assert header.architecture == "llama"
    assert header.metadata == {
        "general.architecture": "llama",
        "general.alignment": 64,
        "eps": 0.5,
        "flag": True,
        "words": ["é", ""],
        "numbers": [-1, 0, 7],
    }
    assert header.tensors == (GGUFTensor("blk.0.w", (4, 32), 8, 128),)
    assert header.data_start == -(-len(head()) // 64) * 64


def test_damage_anywhere_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    for length in range(4, len(head())):
        path.write_bytes(head()[:length])
        with pytest.raises(StartupError, match="damaged or cut-off GGUF"):
            GGUFHeader.read(path)


def test_a_length_beyond_the_file_is_refused_without_taking_memory(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 60) + bytes(64))
    with pytest.raises(StartupError, match="damaged"):
        GGUFHeader.read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a GGUF file"),
        (b"PK\3\4 zip", "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1"),
    ],
)
def test_other_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(StartupError, match=message):
        GGUFHeader.read(path)
    with pytest.raises(StartupError, match="cannot read"):
        GGUFHeader.read(tmp_path / "absent.gguf")


def test_the_default_model() -> None:
    header = GGUFHeader.read(smollm2_gguf())
    assert header.metadata["tokenizer.ggml.pre"] == "smollm"
    assert len(header.metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(header.tensors) == 272
    assert header.tensors[0].shape == (49152, 576)
