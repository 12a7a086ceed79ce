"""A decoder of the shape that most models share, as a few operators of our own for each layer.

    x = x + attention(norm(x)); x = x + down(activation(gate) * up), of norm(x)

transformers' code for such a layer makes some forty small operators; here queries, keys and values
are one product, gates and ups another, and what lies between two products is one pass over the
rows. Where all weights are packed, all layers are one call. Breadth is transformers', speed is for
what is known exactly (`engine/layer_reading.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from engine.attention import check_window, refuse_unknown
from engine.kernels import Kernels
from engine.kernels.decoder import Decoder, PackedLayer
from engine.kernels.layer_ops import LayerOps
from engine.layer_reading import DecoderParts, LayerParts, read_decoder
from engine.packed_model import PackedLinear
from engine.paged_batch import GroupedBatch, PagedBatch

# Makes one module of linear layers with the same inputs: their outputs, side by side.
Join = Callable[[Sequence[nn.Linear]], nn.Module]

_log = logging.getLogger(__name__)


def fuse_layers(model: nn.Module, kernels: Kernels, join: Join | None = None) -> bool:
    """Put a fused decoder in place of that of `model`, on the CPU, if it is understood.

    `join` makes the products' modules (None: plain linear layers); what was replaced is not kept
    alive. Returns whether it was done.
    """
    parts = read_decoder(model)
    if parts is None:
        _log.info("the layers of %s run as transformers has them", type(model).__name__)
        return False
    model.model = FusedDecoder(parts, kernels, join or join_plainly)
    return True


class FusedDecoder(nn.Module):
    """In the place of the base model in transformers' model with a language-modelling head."""

    def __init__(self, parts: DecoderParts, kernels: Kernels, join: Join) -> None:
        super().__init__()
        self._ops = LayerOps(kernels)
        self.embed_tokens, self.rotary_emb = parts.embedding, parts.rotary
        layers = [FusedLayer(each, kernels, self._ops, join) for each in parts.layers]
        self.layers = nn.ModuleList(layers)
        self._parts = [(layer.index, layer.window) for layer in parts.layers]
        self._norm, self._angle_types = parts.norm, parts.angle_types
        packed = [each for layer in layers if (each := layer.packed()) is not None]
        self._whole = Decoder(kernels, packed) if len(packed) == len(layers) else None

    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor,
        paged: PagedBatch | GroupedBatch,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """`input_ids` and `position_ids` [1, T]; keys and values go into their pages.

        Raises TypeError for an argument that is not implemented, ValueError for one that does not
        fit the pool.
        """
        refuse_unknown(kwargs, attention_mask)
        x = self.embed_tokens(input_ids)
        angles = [
            (cos[0], sin[0])
            for cos, sin in (
                self.rotary_emb(x, position_ids, *types) for types in self._angle_types
            )
        ]
        places = [paged.at(index) for index, _ in self._parts]
        for (index, window), (batch, _) in zip(self._parts, places, strict=True):
            check_window(batch, index, window)
        x = x[0]
        if self._whole is not None:
            x = self._whole(x, angles, places)
        else:
            for layer, (batch, place) in zip(self.layers, places, strict=True):
                x = layer(x, angles, batch, place)
        return BaseModelOutputWithPast(last_hidden_state=self._ops.rms_norm(x, self._norm)[None])


class FusedLayer(nn.Module):
    """One layer, whose products may be of any kind."""

    def __init__(self, parts: LayerParts, kernels: Kernels, ops: LayerOps, join: Join) -> None:
        super().__init__()
        self.qkv = join(parts.qkv)
        self.attention_out = join([parts.attention_out])
        self.gate_up = join(parts.gate_up)
        self.down = join([parts.down])
        self._angles, self._head_dim, self._norms = parts.angles, parts.head_dim, parts.norms
        self._scaling, self._window, self._softcap = parts.scaling, parts.window, parts.softcap
        self._activation = parts.activation
        self._kernels, self._ops = kernels, ops

    def packed(self) -> PackedLayer | None:
        """The layer as plain data, where all its weights are packed."""
        products = (self.qkv, self.attention_out, self.gate_up, self.down)
        weights = [product.packed for product in products if isinstance(product, PackedLinear)]
        if len(weights) < len(products):
            return None
        qkv, attention_out, gate_up, down = weights
        return PackedLayer(
            qkv,
            attention_out,
            gate_up,
            down,
            norms=self._norms,
            activation=self._activation,
            head_dim=self._head_dim,
            scaling=self._scaling,
            window=self._window,
            softcap=self._softcap,
            angles=self._angles,
        )

    def forward(
        self, x: Tensor, angles: Sequence[tuple[Tensor, Tensor]], batch: PagedBatch, place: int
    ) -> Tensor:
        """`x` [T, hidden] through the layer; as `Decoder`, to the bit where the products are."""
        ops, norms = self._ops, self._norms
        qkv = self.qkv(ops.rms_norm(x, norms.before_attention))
        cos, sin = angles[self._angles]
        query = ops.rotary_and_write(qkv, cos, sin, batch, place, norms=norms.heads)
        attended = self._kernels.attend(
            query.transpose(0, 1)[None],
            batch,
            place,
            scaling=self._scaling,
            window=self._window,
            softcap=self._softcap,
        )
        y = self.attention_out(attended.view(x.shape[0], -1))
        if norms.after_attention is not None:
            y = ops.rms_norm(y, norms.after_attention)
        y, x = ops.add_rms_norm(y, x, norms.before_mlp)
        y = self.down(ops.gate_mul(self.gate_up(y), self._activation))
        if norms.after_mlp is not None:
            y = ops.rms_norm(y, norms.after_mlp)
        return x.add(y)


def join_plainly(linears: Sequence[nn.Linear]) -> nn.Module:
    """One linear layer of all their outputs; a single one is itself."""
    if len(linears) == 1:
        return linears[0]
    weights: list[Tensor] = [linear.weight for linear in linears]
    biases = [linear.bias for linear in linears]
    has_bias = any(bias is not None for bias in biases)
    with torch.device("meta"):
        joined = nn.Linear(weights[0].shape[1], sum(map(len, weights)), bias=has_bias)
    joined.weight = nn.Parameter(torch.cat(weights), requires_grad=False)
    if has_bias:
        each: list[Tensor] = [
            weight.new_zeros(len(weight)) if bias is None else bias
            for weight, bias in zip(weights, biases, strict=True)
        ]
        joined.bias = nn.Parameter(torch.cat(each), requires_grad=False)
    return joined.eval()
