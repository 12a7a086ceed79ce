"""A whole decoder layer in one call of the kernel library."""

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
    ]


class _Pass(ctypes.Structure):
    """`OwPass` of the C++ source."""

    _fields_: ClassVar = [
        ("pages", _Pages),
        ("x", c_void_p),
        ("out", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("slots", c_void_p),
        ("query_start", c_void_p),
        ("context_len", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("num_rows", c_int64),
        ("num_seqs", c_int32),
        ("rotary_dim", c_int32),
        ("num_threads", c_int32),
        ("parallel", c_void_p),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorms:
    """The norms of a layer, alike but for their weights."""

    before_attention: Norm
    before_mlp: Norm
    after_attention: Norm | None  # of what attention adds
    after_mlp: Norm | None  # of what the MLP adds
    heads: tuple[Norm, Norm] | None  # of each query, of each key

    def __post_init__(self) -> None:
        """Raises ValueError where they differ in more than their weights."""
        if len({(norm.eps, norm.rounds_once) for norm in self.all if norm is not None}) != 1:
            raise ValueError("the norms of a layer differ")

    @property
    def all(self) -> Sequence[Norm | None]:
        """In the order of `OwLayer`."""
        sides = (self.before_attention, self.before_mlp, self.after_attention, self.after_mlp)
        return (*sides, *(self.heads or (None, None)))


class DecoderLayer:
    """One layer's weights and how it computes with them."""

    def __init__(
        self,
        kernels: Kernels,
        weights: Sequence[PackedWeight],
        norms: LayerNorms,
        *,
        activation: Activation,
        head_dim: int,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        """`weights` of queries, keys and values; of attention's output; of gates and ups; of the
        MLP's output, of one dtype. Raises ValueError where they do not fit together, OSError if the
        library lays its arguments out otherwise."""
        library = ctypes.CDLL(str(kernels.path))
        self._run, abi = library.ow_decoder_layer, library.ow_decoder_layer_abi
        self._run.argtypes, self._run.restype = [POINTER(_Layer), POINTER(_Pass)], c_int
        abi.argtypes, abi.restype = [], c_int64
        if abi() != ctypes.sizeof(_Layer) << 32 | ctypes.sizeof(_Pass):
            raise OSError(f"{kernels.path} lays its arguments out otherwise")
        qkv, attention_out = weights[:2]
        self._hidden, self._head_dim, self._qkv_width = qkv.num_inputs, head_dim, qkv.num_outputs
        self._num_heads = attention_out.num_inputs // head_dim
        self._dtype = qkv.dtype
        self._parallel = kernels._parallel
        self._kept = (weights, norms)  # the structure below has bare addresses of them
        self._check_weights(weights, norms, kernels.panel_width)
        norm = norms.before_attention
        self._layer = _Layer(
            *(_linear(weight) for weight in weights),
            *(None if each is None else each.weight.data_ptr() for each in norms.all),
            _DTYPES[qkv.dtype],
            activation,
            self._num_heads,
            window or 0,
            scaling,
            softcap or 0.0,
            norm.eps,
            norm.rounds_once,
        )

    def _check_weights(
        self, weights: Sequence[PackedWeight], norms: LayerNorms, panel_width: int
    ) -> None:
        qkv, attention_out, gate_up, down = weights
        hidden, dim = self._hidden, self._head_dim
        fits = (
            all(w.dtype == qkv.dtype and w.width == panel_width for w in weights)
            and attention_out.num_inputs == self._num_heads * dim
            and gate_up.num_inputs == attention_out.num_outputs == down.num_outputs == hidden
            and gate_up.num_outputs == 2 * down.num_inputs
        )
        widths = [hidden] * 4 + [dim] * 2
        for norm, width in zip(norms.all, widths, strict=True):
            fits = fits and (norm is None or norm.weight.shape == (width,))
        if not fits:
            raise ValueError("the weights of a layer do not fit together")

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: PagedBatch, layer: int
    ) -> Tensor:
        """`x` [T, hidden] through the layer, keys and values into their slots; [T, hidden].

        `cos` and `sin` [T, R] turn the first R elements of each head. All are contiguous, of the
        weights' dtype, which is the pool's. Raises ValueError for what does not fit.
        """
        layout = batch.kv.layout
        num_rows, rotary_dim = x.shape[0], cos.shape[1]
        if (
            x.shape != (batch.num_rows, self._hidden)
            or not cos.shape == sin.shape == (num_rows, rotary_dim)
            or layout.head_dim != self._head_dim
            or (self._num_heads + 2 * layout.num_kv_heads) * self._head_dim != self._qkv_width
            or rotary_dim > self._head_dim
        ):
            raise ValueError(
                f"rows of {list(x.shape)} with angles of {list(cos.shape)} do not fit"
                f" {batch.num_rows} rows of {layout.num_kv_heads} KV heads of {layout.head_dim}"
            )
        if not x.dtype == cos.dtype == sin.dtype == batch.kv.dtype == self._dtype:
            raise ValueError(f"rows of {x.dtype}, weights of {self._dtype}, KV of {batch.kv.dtype}")
        if not (x.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()):
            raise ValueError("rows must lie one behind the other")
        out = torch.empty_like(x)
        args = _Pass(
            _pages(batch, layer),
            x.data_ptr(),
            out.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            batch.slot_mapping.data_ptr(),
            batch.query_start.data_ptr(),
            batch.context_len.data_ptr(),
            batch.block_tables.data_ptr(),
            batch.block_tables.stride(0),
            num_rows,
            len(batch.contexts),
            rotary_dim,
            torch.get_num_threads(),
            self._parallel,
        )
        _check(self._run(ctypes.byref(self._layer), ctypes.byref(args)))
        return out


def _linear(weight: PackedWeight) -> _Linear:
    return _Linear(
        panels=weight.panels.data_ptr(),
        bias=None if weight.bias is None else weight.bias.data_ptr(),
        num_inputs=weight.num_inputs,
        num_outputs=weight.num_outputs,
        dtype=_DTYPES[weight.dtype],
        format=weight.format,
    )
