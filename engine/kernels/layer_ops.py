"""What a decoder layer does between its matrix products, behind typed Python calls.

Each row's result depends on that row alone: it has the same bits in whatever pass and with any
number of threads. Computed in float32 and rounded to the rows' dtype where transformers rounds.
"""

from __future__ import annotations

import ctypes
import enum
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from engine.kernels.native import _DTYPES, Kernels, _Pages, _pages

if TYPE_CHECKING:
    from engine.paged_batch import PagedBatch


class Activation(enum.IntEnum):
    """`Activation` of the C++ source."""

    SILU = 0
    GELU_TANH = 1


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """An RMS norm over the last dimension."""

    weight: Tensor  # float32 [width]
    eps: float
    rounds_once: bool  # to the rows' dtype: after the weight alone, not before it as well


class _Norm(ctypes.Structure):
    """`OwNorm` of the C++ source."""

    _fields_: ClassVar = [
        ("x", c_void_p),
        ("residual", c_void_p),
        ("sum", c_void_p),
        ("out", c_void_p),
        ("weight", c_void_p),
        ("num_rows", c_int64),
        ("width", c_int32),
        ("dtype", c_int32),
        ("eps", c_float),
        ("rounds_once", c_int32),
        ("num_threads", c_int32),
        ("parallel", c_void_p),
    ]


class _Rotary(ctypes.Structure):
    """`OwRotary` of the C++ source."""

    _fields_: ClassVar = [
        ("pages", _Pages),
        ("qkv", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("slots", c_void_p),
        ("num_rows", c_int64),
        ("num_heads", c_int32),
        ("rotary_dim", c_int32),
        ("eps", c_float),
        ("rounds_once", c_int32),
        ("num_threads", c_int32),
        ("parallel", c_void_p),
    ]


class _Gate(ctypes.Structure):
    """`OwGate` of the C++ source."""

    _fields_: ClassVar = [
        ("gate_up", c_void_p),
        ("out", c_void_p),
        ("num_rows", c_int64),
        ("width", c_int32),
        ("dtype", c_int32),
        ("activation", c_int32),
        ("num_threads", c_int32),
        ("parallel", c_void_p),
    ]


class LayerOps:
    """The operators of one kernel library. Every tensor is contiguous and on the CPU."""

    def __init__(self, kernels: Kernels) -> None:
        """Raises OSError if the library lays its arguments out otherwise."""
        library = ctypes.CDLL(str(kernels.path))
        self._norm, self._rotary, self._gate = library.ow_norm, library.ow_rotary, library.ow_gate
        for function, structure in (
            (self._norm, _Norm),
            (self._rotary, _Rotary),
            (self._gate, _Gate),
        ):
            function.argtypes, function.restype = [POINTER(structure)], c_int
        abi = library.ow_layer_ops_abi
        abi.argtypes, abi.restype = [c_int32], c_int64
        if [abi(index) for index in range(3)] != [*map(ctypes.sizeof, (_Norm, _Rotary, _Gate))]:
            raise OSError(f"{kernels.path} lays its arguments out otherwise")
        self._parallel = kernels._parallel

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """`x` [T, width] divided by each row's root mean square, times the weight."""
        return self._normalise(x, norm, None)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """`rms_norm` of `x` + `residual`, both [T, width], and that sum."""
        out, total = self._normalise(x, norm, residual)
        assert total is not None
        return out, total

    def _normalise(
        self, x: Tensor, norm: Norm, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        num_rows, width = x.shape
        if norm.weight.shape != (width,) or not x.is_contiguous():
            raise ValueError(f"{list(x.shape)} rows do not fit a norm of {list(norm.weight.shape)}")
        out, total = torch.empty_like(x), None
        if residual is not None:
            if residual.shape != x.shape or residual.dtype != x.dtype:
                raise ValueError(f"a residual of {list(residual.shape)} for {list(x.shape)}")
            residual, total = residual.contiguous(), torch.empty_like(x)
        args = _Norm(
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            None if total is None else total.data_ptr(),
            out.data_ptr(),
            norm.weight.data_ptr(),
            num_rows,
            width,
            _DTYPES[x.dtype],
            norm.eps,
            norm.rounds_once,
            torch.get_num_threads(),
            self._parallel,
        )
        _check(self._norm(ctypes.byref(args)))
        return out, total

    def rotary_and_write(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: PagedBatch,
        layer: int,
        *,
        norms: tuple[Norm, Norm] | None = None,
    ) -> Tensor:
        """Turn queries and keys by their positions and put keys and values into their slots.

        `qkv` [T, (H + 2 Hkv) * D] is changed in place; `cos` and `sin` [T, R] turn the first R of
        D elements, all of the pool's dtype. `norms` of each query and each key, alike but for
        their weights, come before. Returns the queries [T, H, D] as a view. Raises ValueError for
        what does not fit the pool.
        """
        layout = batch.kv.layout
        dim, num_kv = layout.head_dim, layout.num_kv_heads
        num_rows, width = qkv.shape
        num_heads = width // dim - 2 * num_kv
        rotary_dim = cos.shape[-1]
        if (num_heads + 2 * num_kv) * dim != width or num_heads < 1 or num_rows != batch.num_rows:
            raise ValueError(
                f"qkv of {list(qkv.shape)} does not fit {batch.num_rows} rows of {num_kv} KV heads"
                f" of {dim}"
            )
        if not cos.shape == sin.shape == (num_rows, rotary_dim) or rotary_dim > dim:
            raise ValueError(f"angles of {list(cos.shape)} for {num_rows} heads of {dim}")
        if not qkv.dtype == cos.dtype == sin.dtype == batch.kv.dtype:
            raise ValueError(f"rows of {qkv.dtype} over a pool of {batch.kv.dtype}")
        if not (qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()):
            raise ValueError("rows must lie one behind the other")
        query_norm, key_norm = norms or (None, None)
        if any(norm is not None and norm.weight.shape != (dim,) for norm in (query_norm, key_norm)):
            raise ValueError(f"norms of another width than the heads' {dim}")
        args = _Rotary(
            _pages(batch, layer),
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            None if query_norm is None else query_norm.weight.data_ptr(),
            None if key_norm is None else key_norm.weight.data_ptr(),
            batch.slot_mapping.data_ptr(),
            num_rows,
            num_heads,
            rotary_dim,
            0.0 if query_norm is None else query_norm.eps,
            query_norm is not None and query_norm.rounds_once,
            torch.get_num_threads(),
            self._parallel,
        )
        _check(self._rotary(ctypes.byref(args)))
        return qkv[:, : num_heads * dim].view(num_rows, num_heads, dim)

    def gate_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """The activated first half of each row of `gate_up` [T, 2I] times its second: [T, I]."""
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        if gate_up.shape[1] % 2 or not gate_up.is_contiguous():
            raise ValueError(
                f"rows of {list(gate_up.shape)} are no gates and what they let through"
            )
        out = gate_up.new_empty(num_rows, width)
        args = _Gate(
            gate_up.data_ptr(),
            out.data_ptr(),
            num_rows,
            width,
            _DTYPES[gate_up.dtype],
            activation,
            torch.get_num_threads(),
            self._parallel,
        )
        _check(self._gate(ctypes.byref(args)))
        return out


def _check(status: int) -> None:
    if status != 0:
        raise ValueError(f"a layer operator refused its arguments ({status})")
