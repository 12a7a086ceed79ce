"""A loaded model made ready: fused where it is understood, packed where that is faster."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

from engine import compute_path, packed_model
from engine.attention import NAME, register
from engine.compute_path import use_kernels
from engine.fused_layers import FusedDecoder
from engine.kernels import Kernels, load_kernels
from engine.mapped_files import MappedFiles
from engine.packed_model import PackedLinear, describe
from tests.engine.test_mapped_files import resident
from tests.engine.test_packed_model import quantised
from tests.tiny_models import make_tiny_model

MIB = 1 << 20


@pytest.fixture(scope="module")
def native(kernel_cache: Path) -> Kernels:
    found = load_kernels(kernel_cache)
    assert found is not None
    return found


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    register()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation=NAME)
    return model.eval().requires_grad_(False)


def test_everything_is_packed_and_the_layers_are_one_call(
    native: Kernels, tiny_llama: Path
) -> None:
    model = load(tiny_llama)
    use_kernels(model, native)
    assert isinstance(model.model, FusedDecoder)
    assert model.model._whole is not None
    assert describe(model) == "13 float32"  # four in each of three layers, and the vocabulary's
    decoder = model.model
    use_kernels(model, native)
    assert model.model is decoder


def test_a_model_that_is_not_understood_is_packed_all_the_same(
    native: Kernels, tmp_path: Path
) -> None:
    model = load(make_tiny_model(tmp_path, "gpt_neox"))
    use_kernels(model, native)
    assert type(model.gpt_neox.layers[0].attention.dense) is PackedLinear


def test_quantised_forms_are_found_by_the_names_the_model_was_loaded_with(
    native: Kernels, tiny_llama: Path
) -> None:
    """Two of three that are joined are not enough."""
    model = load(tiny_llama)
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    forms = {
        f"model.layers.{index}.self_attn.{name}.weight": quantised(getattr(attention, name))
        for index, attention in enumerate((first, second))
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    }
    del forms["model.layers.1.self_attn.k_proj.weight"]
    use_kernels(model, native, forms)
    layers = model.model.layers
    assert [layer.qkv.packed.format.name for layer in layers] == ["Q8_0", "FLOAT32", "FLOAT32"]
    assert [layer.attention_out.packed.format.name for layer in layers] == [
        "Q8_0",
        "Q8_0",
        "FLOAT32",
    ]


def test_where_the_processor_multiplies_bfloat16_the_products_stay_torchs(
    native: Kernels, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_model, "has_native_bfloat16", lambda: True)
    model = load(tiny_llama, torch.bfloat16)
    use_kernels(model, native)
    assert isinstance(model.model, FusedDecoder)
    assert model.model._whole is None
    assert type(model.model.layers[0].qkv) is nn.Linear
    assert type(model.lm_head) is nn.Linear


def test_without_kernels_nothing_changes(tiny_llama: Path) -> None:
    model = load(tiny_llama)
    before = list(model.modules())
    use_kernels(model, None)
    assert all(one is other for one, other in zip(model.modules(), before, strict=True))


def test_of_weights_that_were_copied_no_pages_stay(tmp_path: Path) -> None:
    """Joined into one, two mapped weights would be in memory twice."""
    path = tmp_path / "model.safetensors"
    save_file({name: torch.ones(256, 1024) for name in ("a", "b", "c")}, path)
    linears = []
    with safe_open(path, "pt") as file:
        for name in ("a", "b", "c"):
            linear = nn.Linear(1024, 256, bias=False, device="meta")
            linear.weight = nn.Parameter(file.get_tensor(name), requires_grad=False)
            linears.append(linear)
    assert [float(linear.weight.sum()) for linear in linears] == [float(MIB // 4)] * 3
    before = resident(path)
    join = compute_path._join_and_release(MappedFiles())
    assert join(linears[2:]) is linears[2]
    assert resident(path) == before >= 3 * MIB
    joined = join(linears[:2])
    assert resident(path) <= before - 2 * MIB + 3 * mmap.PAGESIZE
    assert float(joined.weight.sum()) == float(MIB // 2)
