"""Which models fit: reads a configuration, refuses by name what our KV cache cannot hold.

Works on transformers' configuration objects without importing torch or transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from engine.errors import StartupError

FULL, WINDOW = "full_attention", "sliding_attention"

# Fields that only configurations with such a state have, with what they mean.
_FOREIGN_FIELDS = {
    "kv_lora_rank": "latent attention (MLA), whose cache is no keys and values",
    "num_kv_shared_layers": "layers that share one another's keys and values",
    "cla_share_factor": "layers that share one another's keys and values",
    "ssm_cfg": "recurrent state-space layers",
    "mamba_d_state": "recurrent state-space layers",
    "state_size": "recurrent state-space layers",
    "mamba_num_heads": "recurrent state-space layers",
    "conv_L_cache": "short convolutions with their own state",
    "linear_conv_kernel_dim": "linear attention with a recurrent state",
    "lru_width": "recurrent layers",
    "rescale_every": "recurrent layers",
    "block_configs": "layers of differing shapes",
    "global_head_dim": "layers of differing head sizes",
}
_ALIBI_TYPES = ("bloom", "mpt")
_SINK_TYPES = ("gpt_oss",)
# Lists here mean that each layer has its own value.
_PER_LAYER = ("num_key_value_heads", "num_attention_heads", "num_kv_heads", "head_dim")


def text_config(config: Any) -> Any:
    """The configuration of the language model itself.

    Raises:
        StartupError: `config` is a wrapper that also takes images or sound.
    """
    inner = config.get_text_config(decoder=True)
    if inner is not config:
        raise StartupError(
            f"model type {config.model_type!r} wraps its text model for images or sound, which are"
            " not served; use a text-only checkpoint"
        )
    return config


def check_supported(config: Any) -> None:
    """Refuse configurations that this engine would serve wrongly or not at all.

    Raises:
        StartupError: the message names the model type and the obstacle.
    """
    for obstacle in _obstacles(config):
        raise StartupError(
            f"model type {config.model_type!r} is not supported: {obstacle};"
            " choose a decoder with plain or sliding-window attention"
        )


def _obstacles(config: Any) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder"
    for field, meaning in _FOREIGN_FIELDS.items():
        if getattr(config, field, None):
            yield f"it has {meaning} ({field})"
    foreign = sorted(set(getattr(config, "layer_types", None) or ()) - {FULL, WINDOW})
    if foreign:
        yield f"it has layers of type {', '.join(map(str, foreign))}"
    if config.model_type in _SINK_TYPES:
        yield "its attention has learned sinks"
    if (
        config.model_type in _ALIBI_TYPES
        or getattr(config, "alibi", False)
        or getattr(config, "position_embedding_type", None) == "alibi"
    ):
        yield "it uses ALiBi positions"
    for field in _PER_LAYER:
        if isinstance(getattr(config, field, None), list | tuple):
            yield f"its layers differ in {field}"
    if getattr(config, "use_bidirectional_attention", False):
        yield "its attention looks ahead"
    quantised = getattr(config, "quantization_config", None)
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        yield f"its weights are quantised ({method}); use an unquantised checkpoint or a GGUF"
    for field in ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"):
        if not isinstance(getattr(config, field, None), int):
            yield f"its configuration has no {field}"


def num_kv_heads(config: Any) -> int:
    """Key-value heads per layer."""
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", 0):
        return 1
    for field in ("num_key_value_heads", "num_kv_heads"):
        if getattr(config, field, None):
            return int(getattr(config, field))
    return int(config.num_attention_heads)


def head_dim(config: Any) -> int:
    """Elements of one key or value."""
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def sliding_windows(config: Any) -> tuple[int | None, ...]:
    """Per layer how many tokens it looks back, its own included; None means all."""
    num_layers = int(config.num_hidden_layers)
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return (None,) * num_layers
    kinds = getattr(config, "layer_types", None) or [WINDOW] * num_layers
    return tuple(int(window) if kind == WINDOW else None for kind in kinds)


def max_model_len(config: Any, asked: int | None, *, clip: bool = False) -> int:
    """Tokens that a request may have in all; with `clip` as many of those asked for as there are.

    Raises:
        StartupError: more are asked for than the model's positions reach, or neither is known.
    """
    own = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if own is None:
        if asked is None:
            raise StartupError("the model does not say its context length; give --max-model-len")
        return asked
    if asked is None or asked <= own or _is_dynamic(config):
        return int(asked or own)
    if clip:
        return int(own)
    raise StartupError(
        f"--max-model-len {asked} exceeds the model's {own} positions; give at most {own}"
    )


def _is_dynamic(config: Any) -> bool:
    rope = getattr(config, "rope_parameters", None) or {}
    return "dynamic" in str(rope.get("rope_type", ""))
