"""Quantised forms are kept for the weights that they are exactly, in the model's order of rows."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine.gguf_blocks import quantised_forms
from engine.gguf_file import GGUFHeader
from engine.quantised_weights import (
    QuantisedWeight,
    quantised_file,
    read_quantised,
    write_quantised,
)
from engine.weight_files import DigestMemo, weight_files
from tests.engine.test_gguf_conversion import convert, stored
from tests.smollm2 import smollm2_cache_dir
from tests.tiny_gguf import HEADS, HIDDEN, LAYERS, write_gguf

Q4_0, Q4_1, Q8_0, Q5_0, F16 = map(
    gguf.GGMLQuantizationType.__getitem__, ["Q4_0", "Q4_1", "Q8_0", "Q5_0", "F16"]
)


def read(directory: Path) -> Mapping[str, QuantisedWeight]:
    memo = DigestMemo(directory.parent / "memo.json")
    digests = [memo.digest(file, lambda *_: None) for file in weight_files(directory)]
    return read_quantised(directory, digests, memo, lambda *_: None)


def bits(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(torch.int32)


def test_values_of_each_kind() -> None:
    low_first = torch.arange(0, 32, 2, dtype=torch.uint8) % 16
    nibbles = (low_first | (low_first + 1) << 4)[None]
    level = torch.arange(32) % 16
    scale, minimum = torch.tensor([[0.5]]).half(), torch.tensor([[-3.0]]).half()
    q4_1 = QuantisedWeight("q4_1", nibbles, scale, minimum)
    assert q4_1.dequantise().tolist() == [(0.5 * level - 3).tolist()]
    q4_0 = QuantisedWeight("q4_0", nibbles, scale)
    assert q4_0.dequantise().tolist() == [(0.5 * (level - 8)).tolist()]
    signed = torch.arange(-16, 16, dtype=torch.int8)[None]
    q8_0 = QuantisedWeight("q8_0", signed, scale)
    assert q8_0.dequantise().tolist() == [(0.5 * signed[0]).tolist()]
    assert q4_1.shape == q4_0.shape == q8_0.shape == (1, 32)


def test_exactly_means_every_bit_of_every_row() -> None:
    rows = 9000  # more than are compared at a time
    levels = torch.full((rows, 16), 0x88, dtype=torch.uint8)
    form = QuantisedWeight("q4_0", levels, torch.ones(rows, 1).half())
    weight = torch.zeros(rows, 32)
    assert form.is_exactly(weight)
    assert not form.is_exactly(weight.bfloat16())
    assert not form.is_exactly(weight[1:])
    for row in (0, rows - 1):
        other = weight.clone()
        other[row, 31] = -0.0
        assert not form.is_exactly(other)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_conversion_keeps_the_forms_of_its_weights(architecture: str, tmp_path: Path) -> None:
    norms = {} if architecture == "llama" else {
        f"blk__{n}__attn_{part}_norm__weight": (HIDDEN // HEADS,)
        for n in range(LAYERS) for part in "qk"
    }  # fmt: skip
    kinds = {"attn_q.weight": Q4_1, "attn_k.weight": Q4_0, "ffn_up.weight": Q4_1}
    other = {"ffn_gate.weight": Q5_0, "attn_v.weight": F16}
    path = write_gguf(tmp_path / "tiny.gguf", architecture, kinds | other, **norms)
    directory = convert(path, tmp_path / "cache")
    weights, forms = stored(directory), read(directory)
    expected = {"model.embed_tokens.weight": "q8_0"}
    for n in range(LAYERS):
        layer = f"model.layers.{n}."
        expected |= {
            f"{layer}self_attn.q_proj.weight": "q4_1",
            f"{layer}self_attn.k_proj.weight": "q4_0",
            f"{layer}self_attn.o_proj.weight": "q8_0",
            f"{layer}mlp.up_proj.weight": "q4_1",
            f"{layer}mlp.down_proj.weight": "q8_0",
        }
    assert {name: form.kind for name, form in forms.items()} == expected
    for name, form in forms.items():
        assert torch.equal(bits(form.dequantise()), bits(weights[name]))
        assert form.scale.dtype == torch.float16
        assert (form.minimum is not None) == (form.kind == "q4_1")


def test_a_weight_that_is_not_exactly_its_form_is_left_out(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    weights = stored(convert(path, tmp_path / "cache"))
    changed = "model.layers.1.mlp.up_proj.weight"
    weights[changed] = torch.nextafter(weights[changed], torch.tensor(9.0))

    class Model(torch.nn.Module):
        def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
            return iter((name, torch.nn.Parameter(weight)) for name, weight in weights.items())

    forms = dict(quantised_forms(GGUFHeader.read(path), Model()))
    assert {name for name, weight in weights.items() if weight.dim() == 2} - set(forms) == {changed}


def test_a_conversion_to_bfloat16_and_a_plain_directory_have_none(
    tmp_path: Path, tiny_llama: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    assert quantised_file(convert(path, tmp_path / "cache", "bfloat16")) is None
    assert read(tiny_llama) == {}


def written(directory: Path) -> Path:
    form = QuantisedWeight("q8_0", torch.ones(2, 32, dtype=torch.int8), torch.ones(2, 1).half())
    save_file({"a.weight": form.dequantise()}, directory / "model.safetensors")
    path = write_quantised(directory, {"a.weight": form})
    assert {file.name for file in directory.iterdir()} == {"model.safetensors", path.name}
    assert list(read(directory)) == ["a.weight"]
    return path


def test_a_file_beside_other_weights_is_left_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    path = written(directory)
    save_file({"a.weight": torch.zeros(2, 32)}, directory / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        assert read(directory) == {}
    assert f"{path} is left aside" in caplog.text
    assert "the weights beside it are others" in caplog.text


def test_a_file_that_is_not_what_was_written_is_left_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    path = written(directory)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert read(directory) == {}
    assert f"{path} is left aside" in caplog.text
    path.write_bytes(content[:-1])
    assert quantised_file(directory) is None


def test_the_default_model_is_quantised_throughout() -> None:
    directory = next((smollm2_cache_dir() / "conversions").glob("*-float32-*[0-9]"))
    forms = read(directory)
    assert {form.kind for name, form in forms.items() if "layers" in name} == {"q4_1"}
    assert forms["model.embed_tokens.weight"].kind == "q8_0"
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        names = file.keys()
        assert set(forms) == {name for name in names if len(file.get_slice(name).get_shape()) == 2}
        for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):
            name = f"model.layers.17.{name}.weight"
            assert forms[name].is_exactly(file.get_tensor(name))
