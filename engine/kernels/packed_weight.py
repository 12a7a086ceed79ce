"""A weight as the linear kernel reads it: laid out once, in panels of as many outputs as a register
block is wide.

`panels.h` has the layout, byte by byte. A weight of floats is kept in the narrowest type that holds
each of its values exactly: a bfloat16 checkpoint served in float32 is read in half the bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from engine.kernels.panel_memory import Place, plain_memory

if TYPE_CHECKING:
    from engine.quantised_weights import QuantisedWeight

T = TypeVar("T")

QUANT_GROUP = 32  # inputs that share a scale


class Format(enum.IntEnum):
    """`Format` of the C++ source."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    Q4_1 = 3
    Q8_0 = 4
    Q4_0 = 5


_DTYPES = {
    Format.FLOAT32: torch.float32,
    Format.BFLOAT16: torch.bfloat16,
    Format.FLOAT16: torch.float16,
}

_QUANTISED = {"q4_1": Format.Q4_1, "q8_0": Format.Q8_0, "q4_0": Format.Q4_0}


class _Group(NamedTuple):
    """What a group of one output is made of; 32 levels of n bits are n words."""

    heads: int  # float16: scale, minimum
    bits: int  # of a level

    @property
    def size(self) -> int:
        return 2 * self.heads + 4 * self.bits


_GROUPS = {Format.Q4_1: _Group(2, 4), Format.Q8_0: _Group(1, 8), Format.Q4_0: _Group(1, 4)}


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """Matrices [N_i, K], one below the other, for `Kernels.linear`."""

    panels: Tensor  # uint8 [bytes]
    format: Format
    num_outputs: int  # N: the sum of the matrices'
    num_inputs: int  # K
    width: int  # outputs of a panel
    dtype: torch.dtype  # of the weight that was packed
    bias: Tensor | None  # float32 [N]

    @classmethod
    def pack(
        cls,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None] = (),
        *,
        width: int,
        place: Place = plain_memory,
    ) -> PackedWeight:
        """Pack float matrices [N_i, K] of one dtype, with a bias [N_i] for each or for none given.

        `width` is `Kernels.panel_width`; the panels go where `place` says. Raises ValueError where
        the matrices do not fit together.
        """
        outputs = [weight.shape[0] for weight in weights]
        num_inputs = _same({weight.shape[1] for weight in weights}, "inputs")
        dtype = _same({weight.dtype for weight in weights}, "dtype")
        form = _narrowest(weights)
        panels = place(-(-sum(outputs) // width) * width * num_inputs * _DTYPES[form].itemsize)
        panels = panels.view(_DTYPES[form]).view(-1, num_inputs, width)
        first = 0
        for weight in weights:
            _scatter(weight.detach(), panels, first)
            first += weight.shape[0]
        return cls(
            panels.view(-1).view(torch.uint8),
            form,
            sum(outputs),
            num_inputs,
            width,
            dtype,
            _stack_biases(biases, outputs),
        )

    @classmethod
    def pack_quantised(
        cls,
        weights: Sequence[QuantisedWeight],
        biases: Sequence[Tensor | None] = (),
        *,
        width: int,
        place: Place = plain_memory,
    ) -> PackedWeight:
        """Pack quantised matrices of one kind; the product is that of their float32 values.

        Raises ValueError where they do not fit together, or for inputs that are no whole groups.
        """
        outputs = [weight.scale.shape[0] for weight in weights]
        num_groups = _same({weight.scale.shape[1] for weight in weights}, "inputs")
        form = _QUANTISED[_same({weight.kind for weight in weights}, "kind")]
        heads, words = _GROUPS[form]
        group_bytes = _GROUPS[form].size * width
        group = place(-(-sum(outputs) // width) * num_groups * group_bytes)
        group = group.view(-1, num_groups, group_bytes)
        scales = group[..., : 2 * heads * width].view(torch.float16)
        levels = group[..., 2 * heads * width :].view(torch.int32)
        first = 0
        for weight in weights:
            if weight.levels.shape[1] * weight.levels.element_size() != num_groups * words * 4:
                raise ValueError(f"{list(weight.levels.shape)} levels for {num_groups} groups")
            parts = [weight.scale] if weight.minimum is None else [weight.scale, weight.minimum]
            for head, part in enumerate(parts[:heads]):
                _scatter(part, scales[..., head * width : (head + 1) * width], first)
            own = weight.levels.view(torch.int32).view(-1, num_groups, words)
            for word in range(words):
                at = levels[..., word * width : (word + 1) * width]
                _scatter(own[..., word], at, first)
            first += weight.scale.shape[0]
        return cls(
            group.view(-1),
            form,
            sum(outputs),
            num_groups * QUANT_GROUP,
            width,
            torch.float32,
            _stack_biases(biases, outputs),
        )

    @staticmethod
    def can_pack_quantised(weights: Sequence[QuantisedWeight]) -> bool:
        """Whether `pack_quantised` takes them together."""
        kinds = {weight.kind for weight in weights}
        return len(kinds) == 1 and kinds <= _QUANTISED.keys()

    def dense(self) -> Tensor:
        """The weight [N, K] as it was given (a quantised one: its values in float32)."""
        count = -(-self.num_outputs // self.width)
        if self.format in _DTYPES:
            panels = self.panels.view(_DTYPES[self.format]).view(count, self.num_inputs, self.width)
            values = panels.to(self.dtype)
        else:
            values = self._dequantised(count)
        whole = values.transpose(1, 2).reshape(count * self.width, self.num_inputs)
        return whole[: self.num_outputs]

    def _dequantised(self, count: int) -> Tensor:
        """float32 [panel, K, width]."""
        heads, bits = _GROUPS[self.format]
        group = self.panels.view(count, self.num_inputs // QUANT_GROUP, -1)
        scale, *rest = (
            group[..., : 2 * heads * self.width]
            .view(torch.float16)
            .float()
            .view(*group.shape[:2], heads, 1, self.width)
            .unbind(2)
        )
        words = group[..., 2 * heads * self.width :].view(torch.int32)
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)[:, None]
        levels = words.view(*group.shape[:2], bits, 1, self.width) >> shifts
        levels = levels & 15 if bits == 4 else levels.to(torch.int8)
        if self.format is Format.Q4_0:
            levels = levels - 8
        values = levels.float().view(*group.shape[:2], QUANT_GROUP, self.width) * scale
        if rest:
            values = values + rest[0]
        return values.view(count, self.num_inputs, self.width)


def _same(values: set[T], what: str) -> T:
    if len(values) != 1:
        raise ValueError(f"matrices of different {what} cannot be packed as one: {values}")
    return values.pop()


def _narrowest(weights: Sequence[Tensor]) -> Format:
    """The narrowest format that holds every value; looks into as few as need be."""
    dtype = weights[0].dtype
    for form in (Format.BFLOAT16, Format.FLOAT16):
        narrow = _DTYPES[form]
        if dtype == narrow or all(_fits(weight, narrow) for weight in weights):
            return form
    return Format.FLOAT32


def _fits(weight: Tensor, dtype: torch.dtype) -> bool:
    if weight.dtype != torch.float32:
        return False
    rows = (weight[:1], weight)  # most that do not fit show it in their first row
    return all(torch.equal(some.to(dtype).to(weight.dtype), some) for some in rows)


def _scatter(matrix: Tensor, panels: Tensor, first: int) -> None:
    """Put `matrix` [n, depth] into `panels` [panel, depth, width] as outputs `first` and on."""
    width = panels.shape[2]
    row = 0
    while row < matrix.shape[0]:
        panel, lane = divmod(first + row, width)
        if lane == 0 and (whole := (matrix.shape[0] - row) // width):
            part = matrix[row : row + whole * width].view(whole, width, -1)
            panels[panel : panel + whole].copy_(part.transpose(1, 2))
            row += whole * width
        else:
            count = min(width - lane, matrix.shape[0] - row)
            panels[panel, :, lane : lane + count].copy_(matrix[row : row + count].T)
            row += count


def _stack_biases(biases: Sequence[Tensor | None], outputs: Sequence[int]) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    parts = [
        torch.zeros(count) if bias is None else bias.detach().float()
        for bias, count in zip(biases, outputs, strict=True)
    ]
    return torch.cat(parts)
