"""Decoder layers of the shape that most models share, each as a few operators of our own.

    x = x + attention(norm(x)); x = x + down(activation(gate) * up), of norm(x)

transformers' code for such a layer makes some forty small operators; here queries, keys and values
are one product, gates and ups another, and what lies between two products is one pass over the
rows. What a layer does is read off transformers' own module, and a module with anything in it that
is not understood stays as it is: breadth is transformers', speed is for what is known exactly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.attention import check_window, refuse_unknown
from engine.kernels import Kernels
from engine.kernels.decoder_layer import DecoderLayer, LayerNorms
from engine.kernels.layer_ops import Activation, LayerOps, Norm
from engine.packed_model import PackedLinear
from engine.paged_batch import GroupedBatch, PagedBatch

# Makes one module of linear layers with the same inputs: their outputs, side by side.
Join = Callable[[Sequence[nn.Linear]], nn.Module]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Family:
    """How a family's layers differ beyond what their modules tell."""

    package: str  # of transformers.models
    prefix: str  # of its class names
    layer_windows: bool = False  # the attention module has its own window
    config_window: bool = False  # the configuration's window holds for every layer
    softcap: bool = False
    gemma: bool = False  # norms weigh by 1 + weight, and there are two more of them


# By the class of the whole model. The version of transformers is pinned, so a class of this name in
# its place is the code that was read.
_FAMILIES = {
    f"{family.prefix}ForCausalLM": family
    for family in (
        _Family("llama", "Llama"),
        _Family("mistral", "Mistral", config_window=True),
        _Family("qwen2", "Qwen2", layer_windows=True),
        _Family("qwen3", "Qwen3", layer_windows=True),
        _Family("phi3", "Phi3", config_window=True),
        _Family("gemma2", "Gemma2", layer_windows=True, softcap=True, gemma=True),
        _Family("gemma3", "Gemma3", layer_windows=True, gemma=True),
    )
}
_ACTIVATIONS = {
    "SiLUActivation": Activation.SILU,
    "SiLU": Activation.SILU,
    "GELUTanh": Activation.GELU_TANH,
}


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """A decoder layer as it was read off transformers' module."""

    index: int
    head_dim: int
    scaling: float  # of the scores
    window: int | None
    softcap: float | None
    activation: Activation
    norms: LayerNorms
    qkv: Sequence[nn.Linear]
    attention_out: nn.Linear
    gate_up: Sequence[nn.Linear]
    down: nn.Linear


def fuse_layers(model: nn.Module, kernels: Kernels, join: Join | None = None) -> int:
    """Put fused layers in place of those of `model`, on the CPU, that are understood.

    `join` makes the products' modules (None: plain linear layers); the layers that were replaced
    keep nothing alive. Returns how many layers are fused: all of them, or none.
    """
    family = _FAMILIES.get(type(model).__name__)
    if family is None or not _is_of(family, model, "ForCausalLM"):
        return 0
    base: Any = getattr(model, "model", None)
    if not (_is_of(family, base, "Model") or _is_of(family, base, "TextModel")):
        return 0
    parts = [read_layer(layer, family) for layer in base.layers]
    norm = _read_norm(base.norm, family)
    if norm is None or _is_hooked(base) or _is_hooked(model):
        return 0
    known = [each for each in parts if each is not None]
    if len(known) < len(parts):
        _log.info("layers of %s run as transformers has them", type(model).__name__)
        return 0
    ops = LayerOps(kernels)
    for place, each in enumerate(known):
        base.layers[place] = FusedLayer(each, kernels, ops, join or join_plainly)
    base.norm = FusedNorm(norm, ops)
    return len(known)


class FusedLayer(nn.Module):
    """A decoder layer that transformers' model calls as one of its own."""

    def __init__(self, parts: LayerParts, kernels: Kernels, ops: LayerOps, join: Join) -> None:
        super().__init__()
        self.qkv = join(parts.qkv)
        self.attention_out = join([parts.attention_out])
        self.gate_up = join(parts.gate_up)
        self.down = join([parts.down])
        self._index, self._window, self._softcap = parts.index, parts.window, parts.softcap
        self._scaling, self._activation = parts.scaling, parts.activation
        self._norms = parts.norms
        self._kernels, self._ops = kernels, ops
        self._whole = self._as_one_call(parts.head_dim)

    def _as_one_call(self, head_dim: int) -> DecoderLayer | None:
        """The layer without a return to Python inside, where all its weights are packed."""
        products = (self.qkv, self.attention_out, self.gate_up, self.down)
        weights = [product.packed for product in products if isinstance(product, PackedLinear)]
        if len(weights) < len(products):
            return None
        return DecoderLayer(
            self._kernels,
            weights,
            self._norms,
            activation=self._activation,
            head_dim=head_dim,
            scaling=self._scaling,
            window=self._window,
            softcap=self._softcap,
        )

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        paged: PagedBatch | GroupedBatch,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """`hidden_states` [1, T, hidden] through the layer, keys and values into their pages.

        Raises TypeError for an argument that is not implemented, ValueError for one that does not
        fit the pool.
        """
        refuse_unknown(kwargs, attention_mask)
        batch, place = paged.at(self._index)
        check_window(batch, self._index, self._window)
        x, (cos, sin) = hidden_states[0], position_embeddings
        if self._whole is not None:
            return self._whole(x, cos[0], sin[0], batch, place)[None]
        return self._in_parts(x, cos[0], sin[0], batch, place)[None]

    def _in_parts(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: PagedBatch, place: int
    ) -> Tensor:
        ops, norms = self._ops, self._norms
        qkv = self.qkv(ops.rms_norm(x, norms.before_attention))
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
        return x + y


class FusedNorm(nn.Module):
    """The norm behind the last layer."""

    def __init__(self, norm: Norm, ops: LayerOps) -> None:
        super().__init__()
        self._norm, self._ops = norm, ops

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`hidden_states` [1, T, hidden], normalised."""
        return self._ops.rms_norm(hidden_states[0], self._norm)[None]


def join_plainly(linears: Sequence[nn.Linear]) -> nn.Module:
    """One linear layer of all their outputs; a single one is itself."""
    if len(linears) == 1:
        return linears[0]
    weights = [linear.weight for linear in linears]
    biases = [linear.bias for linear in linears]
    has_bias = any(bias is not None for bias in biases)
    with torch.device("meta"):
        joined = nn.Linear(weights[0].shape[1], sum(map(len, weights)), bias=has_bias)
    joined.weight = nn.Parameter(torch.cat(weights), requires_grad=False)
    if has_bias:
        each = [
            weight.new_zeros(len(weight)) if bias is None else bias
            for weight, bias in zip(weights, biases, strict=True)
        ]
        joined.bias = nn.Parameter(torch.cat(each), requires_grad=False)
    return joined.eval()


# ------------------------------------------------------------------------ reading a layer's modules


def read_layer(layer: nn.Module, family: _Family) -> LayerParts | None:
    """What the layer does, or None where anything about it is not known."""
    modules = dict(layer.named_modules())
    if any(_is_hooked(module) or module.training for module in modules.values()):
        return None
    del modules[""]
    attention: Any = modules.pop("self_attn", None)
    mlp: Any = modules.pop("mlp", None)
    if not (
        _is_of(family, layer, "DecoderLayer")
        and _is_of(family, attention, "Attention")
        and _is_of(family, mlp, "MLP")
        and attention.is_causal is True
    ):
        return None

    def norm(name: str) -> Norm | None:
        return _read_norm(modules.pop(name, None), family)

    def linears(path: str, *choices: Sequence[str]) -> list[nn.Linear] | None:
        """The modules of the first choice that is there."""
        for names in choices:
            found = [modules.pop(f"{path}.{name}", None) for name in names]
            if all(type(module) is nn.Linear for module in found):
                return found  # type: ignore[return-value]
        return None

    norms = [norm("input_layernorm"), norm("post_attention_layernorm")]
    if family.gemma:
        norms += [norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")]
    head_norms = None
    if "self_attn.q_norm" in modules:
        head_norms = (norm("self_attn.q_norm"), norm("self_attn.k_norm"))
    qkv = linears("self_attn", ("qkv_proj",), ("q_proj", "k_proj", "v_proj"))
    out = linears("self_attn", ("o_proj",))
    gate_up = linears("mlp", ("gate_up_proj",), ("gate_proj", "up_proj"))
    down = linears("mlp", ("down_proj",))
    function = modules.pop("mlp.act_fn", None) or modules.pop("mlp.activation_fn", None)
    activation = _ACTIVATIONS.get(type(function).__name__)
    for name, module in list(modules.items()):
        if type(module) is nn.Dropout:  # does nothing outside training
            del modules[name]
    parts = (*norms, *(head_norms or ()), qkv, out, gate_up, down, activation)
    if modules or any(part is None for part in parts):
        return None
    window = attention.sliding_window if family.layer_windows else None
    if family.config_window:
        window = getattr(attention.config, "sliding_window", None)
    first, second, *inner = norms
    try:
        layer_norms = (
            LayerNorms(first, inner[0], second, inner[1], head_norms)
            if family.gemma
            else LayerNorms(first, second, None, None, head_norms)
        )
    except ValueError:  # of differing eps
        return None
    return LayerParts(
        index=attention.layer_idx,
        head_dim=attention.head_dim,
        scaling=attention.scaling,
        window=window,
        softcap=attention.attn_logit_softcapping if family.softcap else None,
        activation=activation,
        norms=layer_norms,
        qkv=qkv,
        attention_out=out[0],
        gate_up=gate_up,
        down=down[0],
    )


def _read_norm(module: Any, family: _Family) -> Norm | None:
    if not _is_of(family, module, "RMSNorm"):
        return None
    weight = module.weight.detach().float()
    if family.gemma:
        return Norm((1.0 + weight).contiguous(), module.eps, rounds_once=True)
    return Norm(weight.contiguous(), module.variance_epsilon, rounds_once=False)


def _is_of(family: _Family, module: Any, kind: str) -> bool:
    """Whether `module` is of the family's class of that kind, as transformers has it."""
    cls = type(module)
    home = f"transformers.models.{family.package}.modeling_{family.package}"
    return cls.__module__ == home and cls.__qualname__ == family.prefix + kind


def _is_hooked(module: nn.Module) -> bool:
    """Whether something else than the class's own `forward` would run."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return any(hooks) or "forward" in vars(module)
