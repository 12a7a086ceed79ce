from __future__ import annotations

import pytest
import torch

from engine.kernels.packed_weight import Format, PackedWeight
from engine.quantised_weights import QuantisedWeight


def q8(outputs: int, inputs: int) -> QuantisedWeight:
    levels = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    return QuantisedWeight("q8_0", levels, torch.randn(outputs, inputs // 32).half())


def q4(outputs: int, inputs: int) -> QuantisedWeight:
    levels = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    scale, minimum = torch.randn(2, outputs, inputs // 32).half()
    return QuantisedWeight("q4_1", levels, scale, minimum)


@pytest.mark.parametrize("width", [8, 16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_was_packed_is_what_is_unpacked(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(outputs, 33).to(dtype) for outputs in (1, 50, 16, 64, 13)]
    packed = PackedWeight.pack(parts, width=width)
    assert (packed.num_outputs, packed.num_inputs, packed.dtype) == (144, 33, dtype)
    assert packed.dense().dtype == dtype
    assert torch.equal(packed.dense(), torch.cat(parts))
    assert packed.bias is None


def q4_0(outputs: int, inputs: int) -> QuantisedWeight:
    weight = q4(outputs, inputs)
    return QuantisedWeight("q4_0", weight.levels, weight.scale)


@pytest.mark.parametrize("width", [8, 16, 32])
@pytest.mark.parametrize(("make", "size"), [(q4, 20), (q4_0, 18), (q8, 34)])
def test_a_quantised_weight_unpacks_into_its_values(width: int, make: type, size: int) -> None:
    torch.manual_seed(1)
    parts = [make(outputs, 96) for outputs in (3, 50, 32)]
    packed = PackedWeight.pack_quantised(parts, width=width)
    values = torch.cat([part.dequantise() for part in parts])
    assert torch.equal(packed.dense().view(torch.int32), values.view(torch.int32))
    groups = -(-85 // width) * width * 3
    assert packed.panels.nbytes == groups * size


def test_the_narrowest_type_that_holds_every_value_is_used() -> None:
    torch.manual_seed(2)
    brain = (torch.randn(20, 8) * 2.0**40).bfloat16().float()
    half = torch.randn(20, 8).half().float()
    fine = brain.clone()
    fine[-1, -1] = 1 + 2.0**-20
    formats = [PackedWeight.pack([w], width=16).format for w in (brain, half, fine)]
    assert formats == [Format.BFLOAT16, Format.FLOAT16, Format.FLOAT32]
    assert PackedWeight.pack([brain, half], width=16).format is Format.FLOAT32
    assert PackedWeight.pack([brain[:0], brain], width=16).format is Format.BFLOAT16
    assert PackedWeight.pack([brain.half()], width=16).format is Format.FLOAT16


def test_outputs_behind_the_last_are_zeros() -> None:
    packed = PackedWeight.pack([torch.full((3, 5), 2.5)], width=8)
    panels = packed.panels.view(torch.bfloat16).view(5, 8)
    assert panels.tolist() == [[2.5] * 3 + [0.0] * 5] * 5
    scaled = PackedWeight.pack_quantised([q8(3, 32)], width=8).panels.view(-1)
    assert scaled[6:16].tolist() == [0] * 10


def test_a_missing_bias_among_others_is_zeros() -> None:
    parts = [torch.randn(2, 4), torch.randn(3, 4)]
    bias = PackedWeight.pack(parts, [None, torch.tensor([1.0, 2.0, 3.0])], width=8).bias
    assert bias is not None
    assert bias.tolist() == [0, 0, 1, 2, 3]
    assert PackedWeight.pack(parts, [None, None], width=8).bias is None


def test_matrices_that_cannot_be_one_are_refused() -> None:
    with pytest.raises(ValueError, match="different inputs"):
        PackedWeight.pack([torch.randn(2, 4), torch.randn(2, 5)], width=8)
    with pytest.raises(ValueError, match="different dtype"):
        PackedWeight.pack([torch.randn(2, 4), torch.randn(2, 4).half()], width=8)
    with pytest.raises(ValueError, match="different kind"):
        PackedWeight.pack_quantised([q4(2, 32), q8(2, 32)], width=8)
    with pytest.raises(ValueError, match="different inputs"):
        PackedWeight.pack_quantised([q8(2, 32), q8(2, 64)], width=8)
    assert PackedWeight.can_pack_quantised([q4(2, 32), q4(3, 32)])
    assert not PackedWeight.can_pack_quantised([q4(2, 32), q8(2, 32)])
    cut = QuantisedWeight("q8_0", q8(2, 64).levels[:, :32].contiguous(), q8(2, 64).scale)
    with pytest.raises(ValueError, match="levels for 2 groups"):
        PackedWeight.pack_quantised([cut], width=8)
