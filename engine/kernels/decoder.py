"""All layers of a decoder in one call of the kernel library, over packed weights."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from engine.kernels.layer_ops import Activation, Norm
from engine.kernels.native import _DTYPES, Kernels, _check, _Linear, _Pages, _pages
from engine.kernels.packed_weight import PackedWeight

if TYPE_CHECKING:
    from engine.paged_batch import PagedBatch


class _Layer(ctypes.Structure):
    """`OwLayer` of the C++ source."""

    _fields_: ClassVar = [
        ("qkv", _Linear),
        ("attention_out", _Linear),
        ("gate_up", _Linear),
        ("down", _Linear),
        ("before_attention", c_void_p),
        ("before_mlp", c_void_p),
        ("after_attention", c_void_p),
        ("after_mlp", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("dtype", c_int32),
        ("activation", c_int32),
        ("num_heads", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("eps", c_float),
        ("rounds_once", c_int32),
        ("angles", c_int32),
        ("group", c_int32),
        ("place", c_int32),
    ]


class _Group(ctypes.Structure):
    """`OwGroup` of the C++ source; strides count elements."""

    _fields_: ClassVar = [
        ("pages", _Pages),
        ("layer_stride", c_int64),
        ("slots", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
    ]


class _Angles(ctypes.Structure):
    """`OwAngles` of the C++ source."""

    _fields_: ClassVar = [("cos", c_void_p), ("sin", c_void_p), ("rotary_dim", c_int64)]


class _Decoder(ctypes.Structure):
    """`OwDecoder` of the C++ source."""

    _fields_: ClassVar = [
        ("layers", POINTER(_Layer)),
        ("groups", POINTER(_Group)),
        ("angles", POINTER(_Angles)),
        ("x", c_void_p),
        ("out", c_void_p),
        ("query_start", c_void_p),
        ("context_len", c_void_p),
        ("num_rows", c_int64),
        ("num_layers", c_int32),
        ("num_seqs", c_int32),
        ("num_threads", c_int32),
        ("parallel", c_void_p),
    ]


_STRUCTURES = (_Layer, _Group, _Angles, _Decoder)  # in the order of `ow_decoder_abi`


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorms:
    """The norms of a layer, alike but for their weights: else ValueError."""

    before_attention: Norm
    before_mlp: Norm
    after_attention: Norm | None  # of what attention adds
    after_mlp: Norm | None  # of what the MLP adds
    heads: tuple[Norm, Norm] | None  # of each query, of each key

    def __post_init__(self) -> None:
        if len({(norm.eps, norm.rounds_once) for norm in self.all if norm is not None}) != 1:
            raise ValueError("the norms of a layer differ")

    @property
    def all(self) -> Sequence[Norm | None]:
        """In the order of `OwLayer`."""
        sides = (self.before_attention, self.before_mlp, self.after_attention, self.after_mlp)
        return (*sides, *(self.heads or (None, None)))


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayer:
    """A layer's weights and how it computes with them.

    Raises ValueError where the weights do not fit together.
    """

    qkv: PackedWeight  # [(H + 2 Hkv) * D, hidden]
    attention_out: PackedWeight  # [hidden, H * D]
    gate_up: PackedWeight  # [2I, hidden]
    down: PackedWeight  # [hidden, I]
    norms: LayerNorms
    activation: Activation
    head_dim: int  # D
    scaling: float  # of the scores
    window: int | None
    softcap: float | None
    angles: int = 0  # which of a pass's

    def __post_init__(self) -> None:
        hidden = self.qkv.num_inputs
        inner = {self.gate_up.num_inputs, self.attention_out.num_outputs, self.down.num_outputs}
        fits = (
            len({(weight.dtype, weight.width) for weight in self.weights}) == 1
            and self.attention_out.num_inputs % self.head_dim == 0
            and inner == {hidden}
            and self.gate_up.num_outputs == 2 * self.down.num_inputs
        )
        widths = [hidden] * 4 + [self.head_dim] * 2
        for norm, width in zip(self.norms.all, widths, strict=True):
            fits = fits and (norm is None or norm.weight.shape == (width,))
        if not fits:
            raise ValueError("the weights of a layer do not fit together")

    @property
    def weights(self) -> Sequence[PackedWeight]:
        """In the order of `OwLayer`."""
        return self.qkv, self.attention_out, self.gate_up, self.down

    @property
    def num_heads(self) -> int:
        """Of queries."""
        return self.attention_out.num_inputs // self.head_dim

    @property
    def num_kv_heads(self) -> int:
        """Of keys, and as many of values."""
        return (self.qkv.num_outputs // self.head_dim - self.num_heads) // 2

    def structure(self) -> _Layer:
        """With bare addresses of the weights, which must outlive it."""
        norm = self.norms.before_attention
        return _Layer(
            *map(_linear, self.weights),
            *(None if each is None else each.weight.data_ptr() for each in self.norms.all),
            _DTYPES[self.qkv.dtype],
            self.activation,
            self.num_heads,
            self.window or 0,
            self.scaling,
            self.softcap or 0.0,
            norm.eps,
            norm.rounds_once,
            self.angles,
        )


class Decoder:
    """Layers one behind the other. Raises OSError if the library lays its arguments out otherwise,
    ValueError for layers that do not follow on one another."""

    def __init__(self, kernels: Kernels, layers: Sequence[PackedLayer]) -> None:
        library = ctypes.CDLL(str(kernels.path))
        self._decode, abi = library.ow_decode, library.ow_decoder_abi
        self._decode.argtypes, self._decode.restype = [POINTER(_Decoder)], c_int
        abi.argtypes, abi.restype = [c_int32], c_int64
        sizes = [*map(ctypes.sizeof, _STRUCTURES)]
        if [abi(index) for index in range(len(sizes))] != sizes:
            raise OSError(f"{kernels.path} lays its arguments out otherwise")
        alike = {(layer.qkv.num_inputs, layer.qkv.dtype, layer.head_dim) for layer in layers}
        alike_kv = {layer.num_kv_heads for layer in layers}
        if len(alike) != 1 or len(alike_kv) != 1 or layers[0].qkv.width != kernels.panel_width:
            raise ValueError("the layers do not follow on one another")
        ((self._hidden, self._dtype, self._head_dim),) = alike
        (self._num_kv_heads,) = alike_kv
        self._kept = tuple(layers)  # the structures have bare addresses of their weights
        self._layers = (_Layer * len(layers))(*(layer.structure() for layer in layers))
        self._parallel = kernels._parallel

    def __call__(
        self,
        x: Tensor,
        angles: Sequence[tuple[Tensor, Tensor]],
        places: Sequence[tuple[PagedBatch, int]],
    ) -> Tensor:
        """`x` [T, hidden] through all layers, keys and values into their slots; [T, hidden].

        `angles`, of which each layer has its own, are cos and sin [T, R] for the first R elements
        of each head; `places` has for each layer the batch that it reads through and its place in
        a block. All rows are contiguous, of the weights' dtype, which is the pool's. Raises
        ValueError for what does not fit.
        """
        batches: list[PagedBatch] = []
        for layer, (batch, place) in zip(self._layers, places, strict=True):
            if not any(batch is known for known in batches):
                batches.append(batch)
            layer.group = next(i for i, known in enumerate(batches) if known is batch)
            layer.place = place
        self._check_rows(x, angles, batches)
        first, out = batches[0], torch.empty_like(x)
        args = _Decoder(
            self._layers,
            (_Group * len(batches))(*map(_group, batches)),
            (_Angles * len(angles))(
                *(_Angles(cos.data_ptr(), sin.data_ptr(), cos.shape[1]) for cos, sin in angles)
            ),
            x.data_ptr(),
            out.data_ptr(),
            first.query_start.data_ptr(),
            first.context_len.data_ptr(),
            first.num_rows,
            len(self._layers),
            len(first.contexts),
            torch.get_num_threads(),
            self._parallel,
        )
        _check(self._decode(ctypes.byref(args)))
        return out

    def _check_rows(
        self, x: Tensor, angles: Sequence[tuple[Tensor, Tensor]], batches: Sequence[PagedBatch]
    ) -> None:
        tables = [table for pair in angles for table in pair]
        for batch in batches:
            layout = batch.kv.layout
            if (
                x.shape != (batch.num_rows, self._hidden)
                or batch.starts != batches[0].starts
                or batch.contexts != batches[0].contexts
                or layout.head_dim != self._head_dim
                or layout.num_kv_heads != self._num_kv_heads
            ):
                raise ValueError(
                    f"rows of {list(x.shape)} do not fit {batch.num_rows} rows of"
                    f" {layout.num_kv_heads} KV heads of {layout.head_dim}"
                )
            if not x.dtype == batch.kv.dtype == self._dtype:
                raise ValueError(
                    f"rows of {x.dtype}, weights of {self._dtype}, KV of {batch.kv.dtype}"
                )
        for cos, sin in angles:
            if cos.shape != sin.shape or len(cos) != len(x) or cos.shape[1] > self._head_dim:
                raise ValueError(f"angles of {list(cos.shape)} for rows of {list(x.shape)}")
        if any(not rows.is_contiguous() or rows.dtype != x.dtype for rows in (x, *tables)):
            raise ValueError("rows must lie one behind the other, all of one dtype")


def _group(batch: PagedBatch) -> _Group:
    layout = batch.kv.layout
    return _Group(
        _pages(batch, 0),
        2 * layout.plane_elements,
        batch.slot_mapping.data_ptr(),
        batch.block_tables.data_ptr(),
        batch.block_tables.stride(0),
    )


def _linear(weight: PackedWeight) -> _Linear:
    return _Linear(
        panels=weight.panels.data_ptr(),
        bias=None if weight.bias is None else weight.bias.data_ptr(),
        num_inputs=weight.num_inputs,
        num_outputs=weight.num_outputs,
        dtype=_DTYPES[weight.dtype],
        format=weight.format,
    )
