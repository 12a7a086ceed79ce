"""Norms, rotary positions with the write of KV, gates: as transformers computes them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

from engine import paged_reference
from engine.kernels import Kernels
from engine.kernels.layer_ops import Activation, LayerOps, Norm
from engine.kv_cache import KVCache
from engine.kv_layout import KVLayout
from engine.paged_batch import PagedBatch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUM_HEADS, NUM_KV_HEADS = 3, 2
SILU = Activation.SILU


@pytest.fixture(scope="module")
def ops(kernels: Kernels) -> LayerOps:
    return LayerOps(kernels)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def assert_rounded_alike(ours: Tensor, theirs: Tensor) -> None:
    """In float32 up to the order of a sum. In 16 bits the same numbers, but for one in a hundred
    that lies between two; roundings left out or put in elsewhere change one in ten."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    if ours.dtype == torch.float32:
        torch.testing.assert_close(ours, theirs, atol=3e-6, rtol=3e-6)
    else:
        assert (ours != theirs).float().mean() < 0.01
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)


def norm_of(module: Any, dtype: torch.dtype) -> tuple[Norm, Any]:
    """The norm and a module of transformers that has the same weight."""
    torch.nn.init.normal_(module.weight, mean=0.5)
    module.to(dtype).requires_grad_(False)
    if isinstance(module, Gemma2RMSNorm):
        return Norm(1.0 + module.weight.float(), module.eps, True), module
    return Norm(module.weight.float(), module.variance_epsilon, False), module


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma2RMSNorm])
@pytest.mark.parametrize("width", [64, 77, 5])
def test_a_norm_is_that_of_its_family(
    ops: LayerOps, dtype: torch.dtype, kind: type, width: int
) -> None:
    norm, module = norm_of(kind(width, eps=1e-2), dtype)
    x = torch.randn(9, width).to(dtype)
    assert_rounded_alike(ops.rms_norm(x, norm), module(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_is_added_first(ops: LayerOps, dtype: torch.dtype) -> None:
    norm, _ = norm_of(LlamaRMSNorm(77), dtype)
    x, residual = torch.randn(9, 77).to(dtype), torch.randn(9, 77).to(dtype)
    out, total = ops.add_rms_norm(x, residual, norm)
    assert torch.equal(total, residual + x)
    assert torch.equal(out, ops.rms_norm(total, norm))


class Rows:
    """Rows of two sequences and the pages that their keys and values go to."""

    def __init__(self, dtype: torch.dtype, dim: int, rotary_dim: int, rows: int = 7) -> None:
        self.dim, self.rows = dim, rows
        self.qkv = torch.randn(rows, (NUM_HEADS + 2 * NUM_KV_HEADS) * dim).to(dtype)
        angles = torch.rand(rows, rotary_dim) * 6
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.slots = torch.randperm(16 * 4)[:rows]

    def batch(self) -> PagedBatch:
        """Pages of NaN, of which the second layer of three is written."""
        dtype = str(self.qkv.dtype).removeprefix("torch.")
        kv = KVCache(16, KVLayout(3, NUM_KV_HEADS, self.dim, 4, dtype))
        kv.pool.view(kv.dtype).fill_(float("nan"))
        return PagedBatch(
            torch.tensor([0, self.rows], dtype=torch.int32),
            torch.tensor([self.rows], dtype=torch.int32),
            torch.tensor([[0] * 16], dtype=torch.int32),
            self.slots,
            kv,
        )

    def expected(self, norms: tuple[Any, Any] | None) -> tuple[Tensor, PagedBatch]:
        """transformers' rotation, and the reference's write."""
        heads = self.qkv.view(1, self.rows, -1, self.dim)
        query, key, value = heads.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=2)
        if norms is not None:
            query, key = norms[0](query), norms[1](key)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        query, key = apply_rotary_pos_emb(query, key, self.cos[None], self.sin[None])
        batch = self.batch()
        paged_reference.write_kv(key, value, batch, 1)
        return query[0].transpose(0, 1), batch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rotary_dim"), [(32, 32), (24, 24), (32, 12)])
@pytest.mark.parametrize("kind", [None, LlamaRMSNorm, Gemma2RMSNorm])
def test_heads_are_turned_and_written(
    ops: LayerOps, dtype: torch.dtype, dim: int, rotary_dim: int, kind: type | None
) -> None:
    """Some of each head, all of it, with norms before; nothing but the rows' slots changes."""
    rows = Rows(dtype, dim, rotary_dim)
    norms = None if kind is None else [norm_of(kind(dim), dtype) for _ in range(2)]
    query, written = rows.expected(None if norms is None else (norms[0][1], norms[1][1]))
    batch = rows.batch()
    own = rows.qkv.clone()
    given = None if norms is None else (norms[0][0], norms[1][0])
    ours = ops.rotary_and_write(own, rows.cos, rows.sin, batch, 1, norms=given)
    assert ours.data_ptr() == own.data_ptr()
    assert_rounded_alike(ours, query)
    pages, expected = (each.kv.pool.view(each.kv.dtype) for each in (batch, written))
    assert torch.equal(pages.isnan(), expected.isnan())
    assert_rounded_alike(pages.nan_to_num(), expected.nan_to_num())
    assert torch.equal(batch.kv.value(1).nan_to_num(), written.kv.value(1).nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("width", [64, 77, 3])
def test_a_gate_lets_through(
    ops: LayerOps, dtype: torch.dtype, activation: Activation, width: int
) -> None:
    gate_up = (torch.randn(9, 2 * width) * 4).to(dtype)
    gates, ups = gate_up.chunk(2, dim=1)
    wide = gates.double()
    own = F.silu(wide)
    if activation is not SILU:  # as torch has it, but its 1 + tanh loses what is nearly 0
        own = wide * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))
        torch.testing.assert_close(own, F.gelu(wide, approximate="tanh"), atol=1e-9, rtol=0)
    assert_rounded_alike(ops.gate_mul(gate_up, activation), own.to(dtype) * ups)


@pytest.mark.parametrize("activation", Activation)
def test_gates_at_the_ends_of_the_range(ops: LayerOps, activation: Activation) -> None:
    gates = torch.tensor([0.0, 30.0, -30.0, 1e4, -1e4, 3e38, -3e38, float("inf"), float("nan")])
    out = ops.gate_mul(torch.cat([gates, torch.ones(9)])[None], activation)[0]
    assert out[:6].tolist() == [0.0, 30.0, pytest.approx(0.0, abs=1e-11), 1e4, 0.0, gates[5].item()]
    assert out[6] == 0.0
    assert out[7] == float("inf")
    assert out[8].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_alone(ops: LayerOps, dtype: torch.dtype, threads: int) -> None:
    """Among so many rows that they are shared out among threads."""
    dim, count = 88, 261
    before = torch.get_num_threads()
    norm, _ = norm_of(LlamaRMSNorm(dim), dtype)
    x, gate_up = torch.randn(count, dim).to(dtype), torch.randn(count, 2 * dim).to(dtype)
    rows = Rows(dtype, dim, dim, rows=61)
    torch.set_num_threads(threads)
    try:
        normed, total = ops.add_rms_norm(x, x.flip(0), norm)
        gated = ops.gate_mul(gate_up, SILU)
        batch, qkv = rows.batch(), rows.qkv.clone()
        query = ops.rotary_and_write(qkv, rows.cos, rows.sin, batch, 0, norms=(norm, norm))
    finally:
        torch.set_num_threads(before)
    for row in (0, 1, count // 2, count - 1):
        one = slice(row, row + 1)
        alone = ops.add_rms_norm(x[one], x.flip(0)[one], norm)
        assert torch.equal(alone[0], normed[one])
        assert torch.equal(alone[1], total[one])
        assert torch.equal(ops.gate_mul(gate_up[one], SILU), gated[one])
    for row in range(rows.rows):
        one = slice(row, row + 1)
        single = Rows(dtype, dim, dim, rows=1)
        single.slots = rows.slots[one]
        alone_batch = single.batch()
        own = ops.rotary_and_write(
            rows.qkv[one].clone(), rows.cos[one], rows.sin[one], alone_batch, 0, norms=(norm, norm)
        )
        assert torch.equal(own, query[one])
        block, offset = divmod(int(rows.slots[row]), 4)
        for view in (KVCache.key, KVCache.value):
            written = view(batch.kv, 0)[block, :, offset]
            assert torch.equal(view(alone_batch.kv, 0)[block, :, offset], written)


def test_what_does_not_fit_is_refused(ops: LayerOps) -> None:
    norm = Norm(torch.ones(8), 1e-6, False)
    with pytest.raises(ValueError, match="norm of"):
        ops.rms_norm(torch.ones(2, 9), norm)
    with pytest.raises(ValueError, match="norm of"):
        ops.rms_norm(torch.ones(8, 2).T, norm)
    with pytest.raises(ValueError, match="residual"):
        ops.add_rms_norm(torch.ones(2, 8), torch.ones(1, 8), norm)
    with pytest.raises(ValueError, match="gates"):
        ops.gate_mul(torch.ones(2, 7), SILU)
    rows = Rows(torch.float32, 8, 8)
    batch = rows.batch()
    for changes, message in [
        ({"qkv": rows.qkv[:-1]}, "qkv"),
        ({"qkv": rows.qkv[:, :-1].contiguous()}, "qkv"),
        ({"cos": rows.cos[:-1]}, "angles"),
        ({"sin": rows.sin[:, :4]}, "angles"),
        ({"cos": torch.ones(7, 10), "sin": torch.ones(7, 10)}, "angles"),
        ({"qkv": rows.qkv.bfloat16()}, "bfloat16"),
        ({"cos": torch.ones(8, 7).T}, "one behind"),
        ({"norms": (norm, Norm(torch.ones(7), 1e-6, False))}, "width"),
    ]:
        arguments = {"qkv": rows.qkv, "cos": rows.cos, "sin": rows.sin, **changes}
        with pytest.raises(ValueError, match=message):
            ops.rotary_and_write(batch=batch, layer=0, **arguments)  # type: ignore[arg-type]
