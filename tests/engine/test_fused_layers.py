"""Fused layers compute what transformers' own do, and what is not understood stays as it is."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.activations import ACT2FN

from engine.attention import NAME, register
from engine.compute_path import use_kernels
from engine.fused_layers import FusedDecoder, fuse_layers
from engine.kernels import Kernels, load_kernels
from engine.kernels.decoder import Decoder, LayerNorms, PackedLayer
from engine.kernels.layer_ops import Activation, Norm
from engine.kernels.packed_weight import PackedWeight
from tests.engine.test_attention import Sequences
from tests.tiny_models import FAMILIES, make_tiny_model

FUSED = [family for family in FAMILIES if family != "gpt_neox"]
NUM_LAYERS = 3


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")

    def directory(family: str) -> Path:
        path = root / family
        return path if path.exists() else make_tiny_model(path, family)

    return directory


@pytest.fixture(scope="module")
def native(kernel_cache: Path) -> Kernels:
    """The kernels of this processor."""
    found = load_kernels(kernel_cache)
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def load(directories: Callable[[str], Path]) -> Callable[..., Any]:
    def model(family: str, dtype: torch.dtype = torch.float32, attention: str = NAME) -> Any:
        register()
        loaded = AutoModelForCausalLM.from_pretrained(
            directories(family), dtype=dtype, attn_implementation=attention
        )
        return loaded.eval().requires_grad_(False)

    return model


def fuse(model: Any, kernels: Kernels, packed: bool) -> None:
    """As the engine does, or with plain linear layers."""
    if packed:
        use_kernels(model, kernels)
    else:
        fuse_layers(model, kernels)


TOKENS = [[3 + (29 * i + 7 * s) % 370 for i in range(n)] for s, n in enumerate((61, 9, 40))]
STEPS = ([40, 1, 0], [1, 5, 16], [19, 2, 23], [1, 1, 1])  # past the tiny models' windows


def logits_of(model: Any, kernels: Kernels) -> list[torch.Tensor]:
    """Per sequence [tokens, vocab], in packed chunks and single rows."""
    torch.manual_seed(0)
    sequences = Sequences(model, TOKENS, kernels)
    steps = [sequences.step(rows) for rows in STEPS]
    return [torch.cat([step[index] for step in steps]) for index in range(len(TOKENS))]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", FUSED)
def test_a_family_computes_as_with_its_own_code(
    kernels: Kernels, load: Callable[..., Any], family: str, packed: bool
) -> None:
    """Windows, soft caps, biases, head norms, partial weights of either kind: against eager."""
    model, eager = load(family), load(family, attention="eager")
    fuse(model, kernels, packed)
    assert isinstance(model.model, FusedDecoder)
    assert len(model.model.layers) == NUM_LAYERS
    assert (model.model._whole is not None) is packed
    computed = logits_of(model, kernels)
    for ids, ours in zip(TOKENS, computed, strict=True):
        expected = eager(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_sixteen_bits_are_rounded_where_transformers_rounds(
    kernels: Kernels, load: Callable[..., Any], family: str, dtype: torch.dtype
) -> None:
    """The fused model is as far from the exact one as the family's own code is."""
    exact = torch.cat(logits_of(load(family), kernels))
    own = torch.cat(logits_of(load(family, dtype), kernels)).float()
    model = load(family, dtype)
    fuse(model, kernels, packed=False)
    ours = torch.cat(logits_of(model, kernels)).float()
    assert (ours - exact).square().mean() < 1.3 * (own - exact).square().mean()


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_whole_and_in_parts_a_layer_has_the_same_bits(
    kernels: Kernels, load: Callable[..., Any], family: str
) -> None:
    model = load(family)
    fuse(model, kernels, packed=True)
    whole = logits_of(model, kernels)
    model.model._whole = None
    for ours, parts in zip(whole, logits_of(model, kernels), strict=True):
        assert torch.equal(ours, parts)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3"])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    kernels: Kernels, load: Callable[..., Any], family: str
) -> None:
    """Each sequence token by token by itself, against all of them in chunks."""
    model = load(family)
    fuse(model, kernels, packed=True)
    together = logits_of(model, kernels)
    for index in (1, 2):
        alone = Sequences(model, [TOKENS[index]], kernels)
        rows = [alone.step([1])[0] for _ in TOKENS[index]]
        assert torch.equal(torch.cat(rows), together[index])


def test_with_any_number_of_threads_a_pass_has_the_same_bits(
    native: Kernels, load: Callable[..., Any]
) -> None:
    """More of them than some operators have room for, and than there are processors."""
    model = load("qwen3")
    fuse(model, native, packed=True)
    expected = logits_of(model, native)
    for threads in (2, 3, 8) * 3:
        torch.set_num_threads(threads)
        for ours, one in zip(logits_of(model, native), expected, strict=True):
            assert torch.equal(ours, one)


# ---------------------------------------------------------------------- what is left as it was


def attention_of(model: Any) -> Any:
    return model.model.layers[1].self_attn


def is_hooked(model: Any) -> None:
    attention_of(model).register_forward_hook(lambda *_: None)


def is_hooked_before(model: Any) -> None:
    model.model.layers[1].register_forward_pre_hook(lambda *_: None)


def has_another_forward(model: Any) -> None:
    mlp = model.model.layers[2].mlp
    mlp.forward = mlp.forward


def the_model_is_hooked(model: Any) -> None:
    model.model.register_forward_hook(lambda *_: None)


def has_more_in_it(model: Any) -> None:
    attention_of(model).adapter = nn.Identity().eval()


def has_another_product(model: Any) -> None:
    class Scaled(nn.Linear):
        pass

    attention_of(model).v_proj.__class__ = Scaled


def has_another_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = ACT2FN["gelu"].eval()


def has_another_attention(model: Any) -> None:
    class Attention(type(attention_of(model))):  # type: ignore[misc]
        pass

    attention_of(model).__class__ = Attention


def looks_ahead(model: Any) -> None:
    attention_of(model).is_causal = False


def is_training(model: Any) -> None:
    model.train()


def has_norms_that_differ(model: Any) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon *= 2


def has_another_last_norm(model: Any) -> None:
    model.model.norm = nn.RMSNorm(64)


def is_another_model(model: Any) -> None:
    class Model(type(model)):  # type: ignore[misc]
        pass

    Model.__name__ = type(model).__name__
    model.__class__ = Model


@pytest.mark.parametrize(
    "change",
    [
        is_hooked,
        is_hooked_before,
        has_another_forward,
        the_model_is_hooked,
        has_more_in_it,
        has_another_product,
        has_another_activation,
        has_another_attention,
        looks_ahead,
        is_training,
        has_norms_that_differ,
        has_another_last_norm,
        is_another_model,
    ],
)
def test_what_is_not_understood_stays(
    native: Kernels, load: Callable[..., Any], change: Callable[[Any], None]
) -> None:
    model = load("llama")
    change(model)
    before = list(model.modules())
    assert not fuse_layers(model, native)
    assert all(one is other for one, other in zip(model.modules(), before, strict=True))


def test_a_family_that_is_not_known_stays(native: Kernels, load: Callable[..., Any]) -> None:
    assert not fuse_layers(load("gpt_neox"), native)


def test_once_is_enough(native: Kernels, load: Callable[..., Any]) -> None:
    model = load("llama")
    assert fuse_layers(model, native)
    decoder = model.model
    assert not fuse_layers(model, native)
    assert model.model is decoder


def test_nothing_of_a_replaced_layer_stays(native: Kernels, load: Callable[..., Any]) -> None:
    """Its weights lie in the joined ones: twice, they would be the model's memory twice."""
    model = load("qwen2")
    layer = model.model.layers[0]
    weights = [weakref.ref(layer.self_attn.q_proj.weight), weakref.ref(layer.mlp.up_proj.weight)]
    num_weights = sum(p.numel() for p in model.parameters())
    del layer
    fuse_layers(model, native)
    assert [weight() for weight in weights] == [None, None]
    norms = NUM_LAYERS * 2 * 64 + 64  # they are no parameters any more
    assert sum(p.numel() for p in model.parameters()) == num_weights - norms


# ------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("packed", [True, False])
def test_a_fused_decoder_refuses_what_attention_would(
    native: Kernels, load: Callable[..., Any], packed: bool
) -> None:
    model = load("llama")
    fuse(model, native, packed)
    calls: list[Any] = []
    hook = model.model.register_forward_pre_hook(lambda *call: calls.append(call), with_kwargs=True)
    Sequences(model, [TOKENS[1]], native).step([2])
    hook.remove()
    given = calls[0][2]
    model.model(**given)
    with pytest.raises(TypeError, match="'head_mask'"):
        model.model(**given, head_mask=torch.ones(1))
    with pytest.raises(ValueError, match="attention_mask"):
        model.model(**{**given, "attention_mask": torch.zeros(1)})
    for changed in ("input_ids", "position_ids"):
        with pytest.raises(ValueError, match=r"rows|angles"):
            model.model(**{**given, changed: given[changed][:, :1]})
    given["paged"].window = 8
    with pytest.raises(ValueError, match="layer 0 looks back to the beginning"):
        model.model(**given)


def layer_of(native: Kernels, hidden: int = 32, dim: int = 8, **changes: Any) -> PackedLayer:
    """Two heads, one of keys and values."""

    def packed(outputs: int, inputs: int) -> PackedWeight:
        return PackedWeight.pack([torch.randn(outputs, inputs)], width=native.panel_width)

    def norm(width: int) -> Norm:
        return Norm(torch.ones(width), 1e-6, False)

    parts: dict[str, Any] = {
        "qkv": packed(4 * dim, hidden),
        "attention_out": packed(hidden, 2 * dim),
        "gate_up": packed(48, hidden),
        "down": packed(hidden, 24),
        "norms": LayerNorms(norm(hidden), norm(hidden), None, None, (norm(dim), norm(dim))),
        "activation": Activation.SILU,
        "head_dim": dim,
        "scaling": 1.0,
        "window": None,
        "softcap": None,
    }
    return PackedLayer(**{**parts, **changes})


def test_weights_that_do_not_fit_together_are_refused(native: Kernels) -> None:
    layer = layer_of(native)
    other = layer_of(native, hidden=40)
    for name in ("attention_out", "gate_up", "down", "norms"):
        with pytest.raises(ValueError, match="do not fit together"):
            layer_of(native, **{name: getattr(other, name)})
    with pytest.raises(ValueError, match="do not fit together"):
        layer_of(native, gate_up=layer.qkv)
    one, two = (Norm(torch.ones(32), eps, False) for eps in (1e-6, 1e-5))
    with pytest.raises(ValueError, match="norms of a layer differ"):
        LayerNorms(one, two, None, None, None)
    with pytest.raises(ValueError, match="follow on one another"):
        Decoder(native, [layer, other])
    with pytest.raises(ValueError, match="follow on one another"):
        Decoder(native, [layer, layer_of(native, dim=16)])
