"""The compiled kernels behind typed Python calls."""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from engine.kernels.build import KernelBuildError, build_library, detect_variant

if TYPE_CHECKING:
    from engine.kernels.packed_weight import PackedWeight
    from engine.paged_batch import PagedBatch

log = logging.getLogger(__name__)

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Pages(ctypes.Structure):
    """`OwPages` of the C++ source; strides count elements."""

    _fields_: ClassVar = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("block_stride", c_int64),
        ("head_stride", c_int64),
        ("token_stride", c_int64),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("dtype", c_int32),
    ]


class _Attention(ctypes.Structure):
    """`OwAttention` of the C++ source."""

    _fields_: ClassVar = [
        ("pages", _Pages),
        ("query", c_void_p),
        ("out", c_void_p),
        ("query_head_stride", c_int64),
        ("query_row_stride", c_int64),
        ("query_start", c_void_p),
        ("context_len", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("num_seqs", c_int32),
        ("num_heads", c_int32),
        ("window", c_int32),
        ("num_threads", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("parallel", c_void_p),
    ]


class _Write(ctypes.Structure):
    """`OwWrite` of the C++ source."""

    _fields_: ClassVar = [
        ("pages", _Pages),
        ("key", c_void_p),
        ("value", c_void_p),
        ("key_head_stride", c_int64),
        ("key_row_stride", c_int64),
        ("value_head_stride", c_int64),
        ("value_row_stride", c_int64),
        ("slots", c_void_p),
        ("num_rows", c_int64),
    ]


class _Linear(ctypes.Structure):
    """`OwLinear` of the C++ source; strides count elements."""

    _fields_: ClassVar = [
        ("x", c_void_p),
        ("out", c_void_p),
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("x_stride", c_int64),
        ("out_stride", c_int64),
        ("num_rows", c_int64),
        ("num_inputs", c_int32),
        ("num_outputs", c_int32),
        ("dtype", c_int32),
        ("format", c_int32),
        ("num_threads", c_int32),
        ("parallel", c_void_p),
    ]


_STRUCTURES = (_Attention, _Write, _Linear)  # in the order of `ow_abi`


class Kernels:
    """One loaded kernel library. Raises OSError if `path` is not a library of this source."""

    def __init__(self, path: Path, variant: str) -> None:
        library = ctypes.CDLL(str(path))
        try:
            self._attend = library.ow_attend
            self._write_kv = library.ow_write_kv
            self._linear = library.ow_linear
            panel_width = library.ow_panel_width
            abi = library.ow_abi
        except AttributeError as error:
            raise OSError(f"{path} lacks a function: {error}") from error
        self._attend.argtypes, self._attend.restype = [POINTER(_Attention)], c_int
        self._write_kv.argtypes, self._write_kv.restype = [POINTER(_Write)], c_int
        self._linear.argtypes, self._linear.restype = [POINTER(_Linear)], c_int
        abi.argtypes, abi.restype = [c_int32], c_int64
        sizes = [*map(ctypes.sizeof, _STRUCTURES), 0]
        if [abi(index) for index in range(len(sizes))] != sizes:
            raise OSError(f"{path} lays its arguments out otherwise")
        panel_width.argtypes, panel_width.restype = [], c_int32
        self.panel_width: int = panel_width()
        self.path = path
        self.variant = variant
        self._parallel = _find_parallel()

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch, layer: int
    ) -> None:
        """Store each row's key and value, [1, Hkv, T, D] of the pool's dtype, in its slot."""
        key, value = _rows_contiguous(key), _rows_contiguous(value)
        args = _Write(
            _pages(batch, layer),
            key.data_ptr(),
            value.data_ptr(),
            key.stride(1),
            key.stride(2),
            value.stride(1),
            value.stride(2),
            batch.slot_mapping.data_ptr(),
            batch.num_rows,
        )
        _check(self._write_kv(ctypes.byref(args)))

    def attend(
        self,
        query: torch.Tensor,
        batch: PagedBatch,
        layer: int,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Causal attention of `query` [1, H, T, D] over the pages; returns [1, T, H, D].

        As `paged_reference.attend`, and a row's result has the same bits whatever else is in
        the batch, however its prompt was cut into chunks and with any number of threads.
        """
        query = _rows_contiguous(query)
        _, num_heads, num_rows, head_dim = query.shape
        out = query.new_empty(1, num_rows, num_heads, head_dim)
        args = _Attention(
            _pages(batch, layer),
            query.data_ptr(),
            out.data_ptr(),
            query.stride(1),
            query.stride(2),
            batch.query_start.data_ptr(),
            batch.context_len.data_ptr(),
            batch.block_tables.data_ptr(),
            batch.block_tables.stride(0),
            len(batch.contexts),
            num_heads,
            window or 0,
            torch.get_num_threads(),
            scaling,
            softcap or 0.0,
            self._parallel,
        )
        _check(self._attend(ctypes.byref(args)))
        return out

    def linear(
        self, x: torch.Tensor, weight: PackedWeight, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x` [T, K] times the transposed `weight` [N, K], plus its bias: [T, N] of x's dtype.

        Computed in float32, each element as one sum in ascending k: a row's result has the same
        bits alone and among others, with any number of threads, and whatever the weight's format.
        `out`, if given, is written and returned. Raises ValueError for shapes that do not fit.
        """
        num_rows, num_inputs = x.shape
        if num_inputs != weight.num_inputs or weight.width != self.panel_width:
            raise ValueError(
                f"rows of {num_inputs} do not fit a weight of {weight.num_inputs} inputs in panels"
                f" of {weight.width} (these kernels': {self.panel_width})"
            )
        if x.stride(1) != 1:
            x = x.contiguous()
        if out is None:
            out = x.new_empty(num_rows, weight.num_outputs)
        elif out.shape != (num_rows, weight.num_outputs) or out.stride(1) != 1:
            raise ValueError(f"out of {list(out.shape)} for {num_rows} x {weight.num_outputs}")
        elif out.dtype != x.dtype:
            raise ValueError(f"out of {out.dtype} for rows of {x.dtype}")
        args = _Linear(
            x.data_ptr(),
            out.data_ptr(),
            weight.panels.data_ptr(),
            None if weight.bias is None else weight.bias.data_ptr(),
            x.stride(0),
            out.stride(0),
            num_rows,
            num_inputs,
            weight.num_outputs,
            _DTYPES[x.dtype],
            weight.format,
            torch.get_num_threads(),
            self._parallel,
        )
        _check(self._linear(ctypes.byref(args)))
        return out


def load_kernels(cache_dir: Path) -> Kernels | None:
    """The kernels for this processor, built under `cache_dir` if need be; None without them.

    None is worth one line in the log, never an error: the plain reference computes the same.
    """
    variant = detect_variant()
    try:
        path = build_library(cache_dir, variant)
        try:
            return Kernels(path, variant)
        except OSError:
            # Written whole, and yet not loadable: made for another libc, say. Once more from
            # the source, and then no further.
            path.unlink()
            return Kernels(build_library(cache_dir, variant), variant)
    except (KernelBuildError, OSError) as error:
        log.warning("attention and products run without their kernels, slower: %s", error)
        return None


def _find_parallel() -> int | None:
    """Address of `GOMP_parallel` in the OpenMP runtime that torch has loaded.

    Called by address, because linking could bring in a second runtime, whose threads would
    fight torch's for the cores. None, and one thread, where torch has no such runtime.
    """
    with open("/proc/self/maps") as maps:
        loaded = dict.fromkeys(line.split()[-1] for line in maps)
    # Where torch was built into the system, its runtime is the system's.
    own = Path(torch.__file__).parent
    for path in sorted(loaded, key=lambda path: own not in Path(path).parents):
        if Path(path).name.startswith(("libgomp", "libiomp5", "libomp")):
            try:
                function = ctypes.CDLL(path).GOMP_parallel
            except (OSError, AttributeError):
                continue
            return ctypes.cast(function, c_void_p).value
    log.warning("torch has no OpenMP runtime loaded: the kernels use one thread")
    return None


def _pages(batch: PagedBatch, layer: int) -> _Pages:
    keys, values = batch.kv.key(layer), batch.kv.value(layer)
    layout = batch.kv.layout
    return _Pages(
        keys.data_ptr(),
        values.data_ptr(),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        layout.num_kv_heads,
        layout.head_dim,
        layout.block_size,
        _DTYPES[batch.kv.dtype],
    )


def _rows_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _check(status: int) -> None:
    if status != 0:
        raise MemoryError(f"a kernel could not get its working memory ({status})")
