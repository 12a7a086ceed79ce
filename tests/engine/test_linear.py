"""Products with packed weights: exact where float32 is, the same sum everywhere."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels import Kernels
from engine.kernels.packed_weight import Format, PackedWeight
from engine.quantised_weights import QuantisedWeight

# Of the weight: one and more register blocks, their remainders, several pieces of a panel.
SHAPES = [(1, 32), (37, 96), (64, 32), (101, 800)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 13, 30, 150, 300]  # few and many, one task and several
FORMATS = [pytest.param(form, id=form.name.lower()) for form in Format]

QUANTISED = (Format.Q4_0, Format.Q4_1, Format.Q8_0)

Packed = tuple[PackedWeight, Tensor]


def quantised(kind: str, outputs: int, inputs: int, scales: Callable[..., Tensor]) -> Packed:
    groups = (outputs, inputs // 32)
    minimum = None
    if kind == "q4_1":
        minimum = scales(*groups).half()
    if kind == "q8_0":
        levels = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    else:
        levels = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    weight = QuantisedWeight(kind, levels, scales(*groups).half(), minimum)
    return weight, weight.dequantise()  # type: ignore[return-value]


def packed_integers(form: Format, outputs: int, inputs: int, width: int) -> Packed:
    """A weight of small integers, which only `form` or a wider one can hold, and its values."""
    if form in QUANTISED:

        def scales(*shape: int) -> Tensor:
            return torch.randint(-3, 4, shape)

        weight, values = quantised(form.name.lower(), outputs, inputs, scales)
        return PackedWeight.pack_quantised([weight], width=width), values  # type: ignore[list-item]
    most = {Format.BFLOAT16: 128, Format.FLOAT16: 1024, Format.FLOAT32: 4097}[form]
    values = torch.randint(-most, most + 1, (outputs, inputs)).float()
    values[0, 0] = {Format.BFLOAT16: 1, Format.FLOAT16: 1023, Format.FLOAT32: 4097}[form]
    return PackedWeight.pack([values], width=width), values


def packed_floats(form: Format, outputs: int, inputs: int, width: int) -> Packed:
    if form in QUANTISED:
        weight, values = quantised(form.name.lower(), outputs, inputs, torch.randn)
        return PackedWeight.pack_quantised([weight], width=width), values  # type: ignore[list-item]
    dtype = {Format.BFLOAT16: torch.bfloat16, Format.FLOAT16: torch.float16}.get(form)
    values = torch.randn(outputs, inputs).to(dtype or torch.float32).float()
    return PackedWeight.pack([values], width=width), values


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_where_float32_is_exact_the_product_is(
    kernels: Kernels, form: Format, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    for outputs, inputs in SHAPES:
        weight, values = packed_integers(form, outputs, inputs, kernels.panel_width)
        assert weight.format is form
        x = torch.randint(-2, 3, (max(ROWS), inputs)).to(dtype)
        expected = (x.double() @ values.double().T).float().to(dtype)
        for rows in ROWS:
            result = kernels.linear(x[:rows], weight)
            assert result.dtype == dtype
            assert torch.equal(result, expected[:rows]), (outputs, inputs, rows)


@pytest.mark.parametrize("form", FORMATS)
def test_every_element_is_one_sum_in_ascending_k(kernels: Kernels, form: Format) -> None:
    """Factors of powers of two make every product exact: what is left is the order of the sum."""
    torch.manual_seed(1)
    for outputs, inputs in SHAPES:
        weight, values = packed_floats(form, outputs, inputs, kernels.panel_width)
        x = 2.0 ** torch.randint(-3, 4, (max(ROWS), inputs)) * torch.randn(inputs).sign()
        terms = (x[:, None] * values).numpy()  # [row, output, k]
        expected = torch.from_numpy(np.add.accumulate(terms, axis=2, dtype=np.float32)[..., -1])
        for rows in ROWS:
            assert torch.equal(kernels.linear(x[:rows], weight), expected[:rows])


@pytest.mark.parametrize("form", FORMATS)
def test_a_row_has_the_same_bits_alone_and_among_any_others(kernels: Kernels, form: Format) -> None:
    torch.manual_seed(2)
    weight, values = packed_floats(form, 157, 800, kernels.panel_width)
    dense = PackedWeight.pack([values + 0.0], width=kernels.panel_width)
    x = torch.randn(max(ROWS), 800)
    alone = torch.cat([kernels.linear(row[None], weight) for row in x])
    assert torch.equal(alone, torch.cat([kernels.linear(row[None], dense) for row in x]))
    for first in (0, 5):
        for rows in ROWS:
            part = slice(first, first + rows)
            assert torch.equal(kernels.linear(x[part], weight), alone[part])


def test_the_number_of_threads_does_not_change_a_bit(kernels: Kernels) -> None:
    torch.manual_seed(3)
    weight, _ = packed_floats(Format.FLOAT32, 301, 600, kernels.panel_width)
    x = torch.randn(200, 600)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append([kernels.linear(x[:rows], weight) for rows in (1, 5, 40, 200)])
    finally:
        torch.set_num_threads(threads)
    for one, *others in zip(*results, strict=True):
        assert all(torch.equal(one, other) for other in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_below_each_other_are_one_product_and_biases_come_last(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    torch.manual_seed(4)
    parts = [torch.randn(count, 70).to(dtype) for count in (3, 48, 21)]
    biases = [torch.randn(3).to(dtype), None, torch.randn(21).to(dtype)]
    width = kernels.panel_width
    weight = PackedWeight.pack(parts, biases, width=width)
    for rows in (1, 9):
        x = torch.randn(rows, 70).to(dtype)
        expected = []
        for part, bias in zip(parts, biases, strict=True):
            product = kernels.linear(x.float(), PackedWeight.pack([part.float()], width=width))
            expected.append(product if bias is None else product + bias.float())
        assert torch.equal(kernels.linear(x, weight), torch.cat(expected, dim=1).to(dtype))


@pytest.mark.parametrize("rows", [2, 20])
def test_strided_rows_are_read_and_the_given_place_alone_is_written(
    kernels: Kernels, rows: int
) -> None:
    torch.manual_seed(5)
    weight, _ = packed_floats(Format.FLOAT32, 37, 64, kernels.panel_width)
    spaced = torch.full((rows, 80), float("nan"))
    spaced[:, 8:72] = x = torch.randn(rows, 64)
    out = torch.full((rows + 1, 50), 7.0)
    place = out[:rows, 4:41]
    assert kernels.linear(spaced[:, 8:72], weight, place).data_ptr() == place.data_ptr()
    assert torch.equal(place, kernels.linear(x, weight))
    assert torch.equal(place, kernels.linear(x.T.contiguous().T, weight))
    place.fill_(7.0)
    assert bool((out == 7.0).all())


def test_infinite_and_undefined_inputs_stay_in_their_rows(kernels: Kernels) -> None:
    torch.manual_seed(6)
    weight, values = packed_floats(Format.FLOAT32, 20, 64, kernels.panel_width)
    for rows in (3, 20):
        x = torch.randn(rows, 64)
        clean = kernels.linear(x, weight)
        x[1, 5], x[2, 7] = float("inf"), float("nan")
        result = kernels.linear(x, weight)
        assert torch.equal(result[1], values[:, 5] * float("inf"))
        assert bool(result[2].isnan().all())
        assert torch.equal(result[3:], clean[3:])
        assert torch.equal(result[0], clean[0])


def test_no_rows_give_none(kernels: Kernels) -> None:
    weight, _ = packed_floats(Format.FLOAT32, 5, 32, kernels.panel_width)
    assert kernels.linear(torch.empty(0, 32), weight).shape == (0, 5)


def test_what_does_not_fit_is_refused(kernels: Kernels) -> None:
    weight = PackedWeight.pack([torch.randn(5, 32)], width=kernels.panel_width)
    wider = PackedWeight.pack([torch.randn(5, 32)], width=2 * kernels.panel_width)
    x = torch.randn(3, 32)
    with pytest.raises(ValueError, match="rows of 31"):
        kernels.linear(x[:, :31], weight)
    with pytest.raises(ValueError, match="panels of"):
        kernels.linear(x, wider)
    for out in (torch.empty(3, 4), torch.empty(5, 3).T, torch.empty(3, 5, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="out of"):
            kernels.linear(x, weight, out)
