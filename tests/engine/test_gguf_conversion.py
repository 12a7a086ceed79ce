"""A GGUF is converted once, wholly, by one process, into exactly its own weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors import safe_open

from engine import gguf_conversion
from engine.errors import StartupError
from engine.gguf_conversion import converted_directory
from engine.weight_files import DigestMemo
from tests.smollm2 import smollm2_cache_dir, smollm2_gguf
from tests.tiny_gguf import LAYERS, TOKENS, write_gguf


def convert(path: Path, cache: Path, dtype: str = "float32", report: Any = None) -> Path:
    memo = DigestMemo(cache / "digests.json")
    return converted_directory(path, dtype, cache, memo, report or (lambda *_: None))


def stored(directory: Path) -> dict[str, torch.Tensor]:
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_weights_are_dequantised_straight_into_the_dtype(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    exact = {
        tensor.name: torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in gguf.GGUFReader(path).tensors
    }
    float32 = stored(convert(path, tmp_path / "cache"))
    bfloat16 = stored(convert(path, tmp_path / "cache", "bfloat16"))
    for ours, theirs in [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight"),
        ("model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight"),
        ("model.norm.weight", "output_norm.weight"),
    ]:
        assert torch.equal(float32[ours], exact[theirs])
        assert torch.equal(bfloat16[ours], exact[theirs].bfloat16())
    # Eight bits of mantissa would show: this is not a widened bfloat16.
    embedding = float32["model.embed_tokens.weight"]
    assert not torch.equal(embedding, embedding.bfloat16().float())
    assert "lm_head.weight" not in float32


def test_config_floats_are_what_was_written(tmp_path: Path) -> None:
    directory = convert(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache")
    config = json.loads((directory / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-05
    assert config["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == 128
    assert config["vocab_size"] == len(TOKENS)
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [0]


def test_second_call_uses_the_conversion_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    first = convert(path, tmp_path / "cache")
    monkeypatch.setattr(gguf_conversion, "_convert_into", lambda *_: pytest.fail("converted again"))
    phases: list[str] = []
    assert convert(path, tmp_path / "cache", report=lambda phase, _: phases.append(phase)) == first
    assert "converting" not in phases
    # The same content elsewhere is the same model.
    copy = tmp_path / "renamed.gguf"
    copy.write_bytes(path.read_bytes())
    assert convert(copy, tmp_path / "cache") == first


def test_dtype_content_and_version_each_have_their_own_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache"
    found = {convert(path, cache), convert(path, cache, "bfloat16")}
    with path.open("ab") as file:
        file.write(b"\0")
    found.add(convert(path, cache))
    monkeypatch.setattr(gguf_conversion, "VERSION", 10**6)
    found.add(convert(path, cache))
    assert len(found) == 4


def test_progress_rises_to_the_end(tmp_path: Path) -> None:
    seen: list[float] = []

    def report(phase: str, percent: float) -> None:
        if phase == "converting":
            seen.append(percent)

    convert(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache", report=report)
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0.0, 100.0)
    assert len(seen) > 10


def test_remains_of_a_crash_are_ignored_and_swept(tmp_path: Path) -> None:
    path, cache = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache"
    target = convert(path, cache)
    content = {file.name: file.read_bytes() for file in target.iterdir()}
    # Killed in mid-write: the partial directory has whatever had reached the disk.
    partial = target.with_name(target.name + ".partial")
    target.rename(partial)
    (partial / "model.safetensors").write_bytes(content["model.safetensors"][:1000])
    (partial / "leftover").write_text("x")
    assert convert(path, cache) == target
    assert not partial.exists()
    assert {file.name: file.read_bytes() for file in target.iterdir()} == content


@pytest.mark.parametrize("damage", ["missing", "truncated"])
@pytest.mark.parametrize("name", ["model", "quantised-*"])
def test_a_damaged_conversion_is_done_again(name: str, damage: str, tmp_path: Path) -> None:
    path, cache = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache"
    (weights,) = convert(path, cache).glob(f"{name}.safetensors")
    whole = weights.read_bytes()
    if damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(whole[:-1])
    assert convert(path, cache) == weights.parent
    assert weights.read_bytes() == whole


def test_a_failed_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_conversion, "save_tokenizer", full_disk)
    with pytest.raises(StartupError, match="No space left on device; free space"):
        convert(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache")
    assert [p.suffix for p in (tmp_path / "cache" / "conversions").iterdir()] == [".lock"]


CONVERT = """
import sys
from pathlib import Path
from engine import gguf_conversion
from engine.weight_files import DigestMemo

path, cache = Path(sys.argv[1]), Path(sys.argv[2])
phases = set()
sys.stdin.readline()
directory = gguf_conversion.converted_directory(
    path, "float32", cache, DigestMemo(cache / "digests.json"), lambda phase, _: phases.add(phase)
)
print(directory, "converting" in phases)
"""


def test_two_processes_at_once_make_one_conversion(tmp_path: Path) -> None:
    path, cache = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache"
    command = [sys.executable, "-c", CONVERT, str(path), str(cache)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [process.communicate(timeout=120)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert results[0][0] == results[1][0]
    assert sorted(result[1] for result in results) == ["False", "True"]
    assert len(stored(Path(results[0][0]))) == 2 + 9 * LAYERS


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"rope_freqs__weight": (4,)}, "scales its RoPE .rope_freqs.weight."),
        ({"llama__rope__scaling__type": "yarn"}, "scales its RoPE .yarn."),
        ({"blk__0__surprise__weight": (32, 32)}, "1024 elements over"),
    ],
)
def test_what_would_be_lost_is_refused(extra: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=message):
        convert(write_gguf(tmp_path / "tiny.gguf", **extra), tmp_path / "cache")


def test_unsupported_architecture_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="GGUF architecture 'mamba'"):
        convert(write_gguf(tmp_path / "tiny.gguf", "mamba"), tmp_path / "cache")


def test_cut_off_file_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    content = path.read_bytes()
    path.write_bytes(content[:-64])
    with pytest.raises(StartupError, match="is cut off"):
        convert(path, tmp_path / "cache")
    path.write_bytes(content[:500])
    with pytest.raises(StartupError, match="damaged or cut-off"):
        convert(path, tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="choose another --cache-dir"):
        convert(path, tmp_path / "file" / "cache")


def test_smollm2_conversion_is_exact() -> None:
    directory = next((smollm2_cache_dir() / "conversions").glob("*-float32-*[0-9]"))
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_gguf()).tensors}
    source = tensors["blk.29.ffn_down.weight"]
    expected = torch.from_numpy(gguf.dequantize(source.data, source.tensor_type).copy())
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        assert len(file.keys()) == 272
        actual = file.get_tensor("model.layers.29.mlp.down_proj.weight")
    assert source.tensor_type.name == "Q4_1"
    assert torch.equal(actual, expected)
