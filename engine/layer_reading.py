"""What transformers' module of a decoder does, read off it; or that it is not known.

A module is known when its class, in its place in the pinned version of transformers, is one whose
code was read, and when nothing is in it, around it or hung on it that the reading did not name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.activations import GELUTanh, SiLUActivation

from engine.kernels.decoder import LayerNorms
from engine.kernels.layer_ops import Activation, Norm


@dataclass(frozen=True, slots=True)
class _Family:
    """How a family's layers differ beyond what their modules tell."""

    package: str  # of transformers.models
    prefix: str  # of its class names
    layer_windows: bool = False  # the attention module has its own window
    config_window: bool = False  # the configuration's window holds for every layer
    softcap: bool = False
    angles_by_type: bool = False  # the rotary embedding has other angles for each type of layer
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
        _Family("gemma3", "Gemma3", layer_windows=True, angles_by_type=True, gemma=True),
    )
}
_ACTIVATIONS = {
    SiLUActivation: Activation.SILU,
    nn.SiLU: Activation.SILU,
    GELUTanh: Activation.GELU_TANH,
}


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """A decoder layer as it was read off transformers' module."""

    index: int
    angles: int  # which of the decoder's
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


@dataclass(frozen=True, slots=True, eq=False)
class DecoderParts:
    """A model's decoder as it was read off transformers' module."""

    embedding: nn.Module
    rotary: nn.Module
    angle_types: Sequence[tuple[str, ...]]  # what the rotary embedding takes, once for each angles
    layers: Sequence[LayerParts]
    norm: Norm


def read_decoder(model: Any) -> DecoderParts | None:
    """What `model.model` does, or None where anything about it is not known."""
    family = _FAMILIES.get(type(model).__name__)
    if family is None or not _is_of(family, model, "ForCausalLM"):
        return None
    base = model.model
    children = dict(base.named_children())
    if (
        not (_is_of(family, base, "Model") or _is_of(family, base, "TextModel"))
        or children.keys() != {"embed_tokens", "layers", "norm", "rotary_emb"}
        or any(map(_is_hooked, (model, base, base.norm)))
        or not _is_of(family, base.rotary_emb, "RotaryEmbedding")
        or len(base.layers) != base.config.num_hidden_layers
    ):
        return None
    types: list[tuple[str, ...]] = [()]
    if family.angles_by_type:
        types = [(name,) for name in dict.fromkeys(base.config.layer_types)]
    layers = [_read_layer(layer, family, types) for layer in base.layers]
    known = [layer for layer in layers if layer is not None]
    norm = _read_norm(base.norm, family)
    if norm is None or not known or len(known) < len(layers):
        return None
    if [layer.index for layer in known] != list(range(len(known))):
        return None
    return DecoderParts(base.embed_tokens, base.rotary_emb, types, known, norm)


class _Modules:
    """The modules of one layer by name; each that is understood is taken out."""

    def __init__(self, layer: nn.Module, family: _Family) -> None:
        self._rest = dict(layer.named_modules())
        self._family = family

    def take(self, name: str, kind: str) -> Any:
        """The module of the family's own class `kind`, or None."""
        module = self._rest.pop(name, None)
        return module if _is_of(self._family, module, kind) else None

    def norm(self, name: str) -> Norm | None:
        return _read_norm(self._rest.pop(name, None), self._family)

    def head_norms(self) -> tuple[Norm | None, ...]:
        """Of each query and each key; empty where there are none."""
        if "self_attn.q_norm" not in self._rest:
            return ()
        return self.norm("self_attn.q_norm"), self.norm("self_attn.k_norm")

    def linears(self, *choices: Sequence[str]) -> list[nn.Linear] | None:
        """Those of the first choice that is there, or None."""
        for names in choices:
            if all(type(self._rest.get(name)) is nn.Linear for name in names):
                return [self._rest.pop(name) for name in names]
        return None

    def activation(self) -> Activation | None:
        function = self._rest.pop("mlp.act_fn", None) or self._rest.pop("mlp.activation_fn", None)
        return _ACTIVATIONS.get(type(function))

    def is_empty(self) -> bool:
        """Whether all was understood. Dropout does nothing outside training."""
        return all(type(module) is nn.Dropout for module in self._rest.values())


def _read_layer(
    layer: nn.Module, family: _Family, angle_types: Sequence[tuple[str, ...]]
) -> LayerParts | None:
    """What the layer does, or None where anything about it is not known."""
    if any(_is_hooked(module) or module.training for module in layer.modules()):
        return None
    modules = _Modules(layer, family)
    own, mlp = modules.take("", "DecoderLayer"), modules.take("mlp", "MLP")
    attention = modules.take("self_attn", "Attention")
    sides = [modules.norm("input_layernorm"), modules.norm("post_attention_layernorm")]
    if family.gemma:
        inner = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
        sides += map(modules.norm, inner)
    heads = modules.head_norms()
    qkv = modules.linears(
        ("self_attn.qkv_proj",), [f"self_attn.{name}_proj" for name in ("q", "k", "v")]
    )
    out = modules.linears(("self_attn.o_proj",))
    gate_up = modules.linears(("mlp.gate_up_proj",), ("mlp.gate_proj", "mlp.up_proj"))
    down, activation = modules.linears(("mlp.down_proj",)), modules.activation()
    parts = (own, mlp, attention, *sides, *heads, qkv, out, gate_up, down, activation)
    norms = None if None in parts else _layer_norms(sides, heads)
    if norms is None or not modules.is_empty() or attention.is_causal is not True:
        return None
    assert qkv is not None
    assert out is not None
    assert gate_up is not None
    assert down is not None
    assert activation is not None
    window = attention.sliding_window if family.layer_windows else None
    if family.config_window:
        window = getattr(attention.config, "sliding_window", None)
    return LayerParts(
        index=attention.layer_idx,
        angles=angle_types.index((attention.layer_type,)) if family.angles_by_type else 0,
        head_dim=attention.head_dim,
        scaling=attention.scaling,
        window=window,
        softcap=attention.attn_logit_softcapping if family.softcap else None,
        activation=activation,
        norms=norms,
        qkv=qkv,
        attention_out=out[0],
        gate_up=gate_up,
        down=down[0],
    )


def _layer_norms(sides: Sequence[Any], heads: Sequence[Any]) -> LayerNorms | None:
    """In the order that transformers names them; None where they differ in more than weights."""
    before, after, *inner = sides
    both = (heads[0], heads[1]) if heads else None
    try:
        if inner:
            return LayerNorms(before, inner[0], after, inner[1], both)
        return LayerNorms(before, after, None, None, both)
    except ValueError:
        return None


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
