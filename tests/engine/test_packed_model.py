"""Linear layers replaced by packed ones: the same model, nothing of the old weights kept."""

from __future__ import annotations

import gc
import mmap
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from engine import packed_model
from engine.kernels import Kernels
from engine.kernels.packed_weight import Format
from engine.packed_model import LinearPacker, PackedLinear, describe, linear_packer
from engine.quantised_weights import QuantisedWeight
from tests.engine.test_mapped_files import resident
from tests.running_engine import running_engine


class Model(nn.Module):
    """Tied, shared, hooked, with and without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(70, 64)
        self.layers = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64, bias=False)])
        self.again = self.layers[0]
        self.hooked = nn.Linear(64, 64)
        self.hooked.register_forward_hook(lambda module, args, output: output * 2)
        self.lm_head = nn.Linear(64, 70, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in (*self.layers, self.again, self.hooked):
            x = torch.tanh(layer(x))
        logits: Tensor = self.lm_head(x)
        return logits


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().requires_grad_(False).eval()


IDS = torch.arange(22).view(2, 11)


def test_every_plain_layer_is_replaced_and_the_model_computes_the_same(
    kernels: Kernels, model: Model
) -> None:
    before, embedding = model(IDS), model.embed.weight
    weights = [layer.weight for layer in (model.layers[0], model.layers[1], model.lm_head)]
    bias = model.layers[0].bias
    assert LinearPacker(model, kernels).pack_rest() == 4
    replaced = [model.layers[0], model.layers[1], model.lm_head]
    assert [type(layer) for layer in replaced] == [PackedLinear] * 3
    assert model.again is model.layers[0]
    assert type(model.hooked) is nn.Linear
    assert model.embed.weight is embedding
    torch.testing.assert_close(model(IDS), before, atol=1e-5, rtol=1e-5)
    for layer, weight in zip(replaced, weights, strict=True):
        assert torch.equal(layer.weight, weight)
    assert torch.equal(replaced[0].bias, bias)
    assert replaced[1].bias is None
    assert describe(model) == "3 float32"


def test_nothing_of_the_old_weights_is_kept(kernels: Kernels, model: Model) -> None:
    old = [weakref.ref(layer) for layer in model.layers]
    old += [weakref.ref(layer.weight) for layer in model.layers]
    packer = LinearPacker(model, kernels)
    packer.pack_rest()
    gc.collect()
    assert [reference() for reference in old] == [None] * 4
    assert packer.pack_rest() == 0


def test_layers_with_the_same_inputs_are_joined_side_by_side(
    kernels: Kernels, model: Model
) -> None:
    pair = [model.layers[0], model.layers[1]]
    joined = LinearPacker(model, kernels).join(pair)
    for x in (torch.randn(3, 64), torch.randn(2, 7, 64), torch.randn(2, 64, 3).transpose(1, 2)):
        expected = torch.cat([layer(x) for layer in pair], dim=-1)
        torch.testing.assert_close(joined(x), expected, atol=1e-5, rtol=1e-5)
    assert (joined.in_features, joined.out_features) == (64, 128)


def quantised(linear: nn.Linear, kind: str = "q8_0") -> QuantisedWeight:
    """Random, and from now on the layer's own weight."""
    outputs, inputs = linear.weight.shape
    levels = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    scale = torch.rand(outputs, inputs // 32).half() / 512
    minimum = None
    if kind == "q4_1":
        levels = levels[:, : inputs // 2].contiguous().view(torch.uint8)
        minimum = scale * -8
    weight = QuantisedWeight(kind, levels, scale, minimum)
    linear.weight.copy_(weight.dequantise())
    return weight


def test_a_quantised_form_is_used_by_its_name_and_gives_the_same_bits(
    kernels: Kernels, model: Model
) -> None:
    first, second = model.layers
    forms = {"layers.0.weight": quantised(first), "layers.1.weight": quantised(second, "q4_1")}
    x = torch.randn(5, 64)
    plain = LinearPacker(model, kernels)
    dense = [plain.join([layer]) for layer in (first, second, model.hooked)]
    packer = LinearPacker(model, kernels, forms)
    packed = [packer.join([layer]) for layer in (first, second, model.hooked)]
    assert [layer.packed.format for layer in packed] == [
        Format.Q8_0,
        Format.Q4_1,
        Format.FLOAT32,
    ]
    for one, other in zip(packed, dense, strict=True):
        assert torch.equal(one(x), other(x))
        assert torch.equal(one.weight, other.weight)


def test_a_tied_layer_has_the_form_of_the_table(kernels: Kernels, model: Model) -> None:
    form = quantised(model.lm_head)
    joined = LinearPacker(model, kernels, {"embed.weight": form}).join([model.lm_head])
    assert joined.packed.format is Format.Q8_0
    assert torch.equal(joined.weight, model.embed.weight)


def test_a_group_is_quantised_only_as_a_whole_and_of_one_kind(
    kernels: Kernels, model: Model
) -> None:
    first, second = model.layers
    forms = {"layers.0.weight": quantised(first), "layers.1.weight": quantised(second)}
    both = LinearPacker(model, kernels, forms).join([first, second])
    assert both.packed.format is Format.Q8_0
    del forms["layers.1.weight"]
    half = LinearPacker(model, kernels, forms).join([first, second])
    assert half.packed.format is Format.FLOAT32
    x = torch.randn(3, 64)
    assert torch.equal(both(x), half(x))
    forms["layers.1.weight"] = quantised(second, "q4_1")
    mixed = LinearPacker(model, kernels, forms).join([first, second])
    assert mixed.packed.format is Format.FLOAT32


def test_where_layers_are_best_left_alone_there_is_no_packer(
    kernels: Kernels, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def native(present: bool) -> None:
        monkeypatch.setattr(packed_model, "has_native_bfloat16", lambda: present)

    native(True)
    assert linear_packer(model, kernels) is not None
    assert linear_packer(model, None) is None
    assert linear_packer(Model().to("meta"), kernels) is None
    assert linear_packer(model.bfloat16(), kernels) is None
    native(False)
    assert linear_packer(model, kernels) is not None


async def test_an_engine_serves_packed_layers(tiny_llama: Path, kernel_cache: Path) -> None:
    """Of the model and of its draft: the tied one too; the looked-up table is the loaded one."""
    async with running_engine(
        tiny_llama, kernel_cache, speculative=f"draft:{tiny_llama}", speculative_tokens=3
    ) as engine:
        drafter: Any = engine._parts.drafter
        served: list[Any] = [engine._parts.core._runner._model, drafter._drafter._runner._model]
        assert served[0] is not served[1]
        for model in served:
            linears = [m for m in model.modules() if isinstance(m, nn.Linear | PackedLinear)]
            assert {type(linear) for linear in linears} == {PackedLinear}
            assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_the_pages_of_a_mapped_weight_are_given_back(kernels: Kernels, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.randn(512, 512)}, path)
    with safe_open(path, framework="pt") as file:
        linear = nn.Linear(512, 512, bias=False, device="meta")
        linear.weight = nn.Parameter(file.get_tensor("weight"), requires_grad=False)
    assert bool(linear(torch.randn(1, 512)).isfinite().all())
    before = resident(path)
    LinearPacker(linear, kernels).join([linear])
    assert resident(path) <= before - linear.weight.nbytes + 2 * mmap.PAGESIZE
