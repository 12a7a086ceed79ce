"""What our KV cache cannot hold is refused by name; what it can is described exactly."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers import AutoConfig

from engine.architecture import (
    check_supported,
    head_dim,
    max_model_len,
    num_kv_heads,
    sliding_windows,
    text_config,
)
from engine.errors import StartupError


@pytest.mark.parametrize(
    ("model_type", "obstacle"),
    [
        ("t5", "encoder-decoder"),
        ("deepseek_v3", "latent attention"),
        ("mamba", "state-space"),
        ("mamba2", "state-space"),
        ("falcon_mamba", "state-space"),
        ("jamba", "state-space"),
        ("bamba", "state-space"),
        ("zamba2", "state-space"),
        ("rwkv", "recurrent"),
        ("recurrent_gemma", "recurrent"),
        ("lfm2", "convolutions"),
        ("qwen3_next", "linear"),
        ("gemma3n_text", "share one another's keys"),
        ("gpt_oss", "sinks"),
        ("bloom", "ALiBi"),
        ("mpt", "ALiBi"),
        ("llama4_text", "layers of type chunked_attention"),
    ],
)
def test_foreign_kv_is_refused_by_name(model_type: str, obstacle: str) -> None:
    config = AutoConfig.for_model(model_type)
    with pytest.raises(StartupError, match=obstacle) as caught:
        check_supported(config)
    assert f"'{config.model_type}'" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "obstacle"),
    [
        ({"alibi": True}, "ALiBi"),
        ({"num_key_value_heads": [2, 4]}, "differ in num_key_value_heads"),
        ({"use_bidirectional_attention": True}, "looks ahead"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantised \(awq\)"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "of type linear_attention"),
        ({"hidden_size": None}, "no hidden_size"),
    ],
)
def test_obstacles_in_any_model(fields: dict[str, Any], obstacle: str) -> None:
    config = transformers.LlamaConfig()
    check_supported(config)
    for name, value in fields.items():
        object.__setattr__(config, name, value)
    with pytest.raises(StartupError, match=obstacle):
        check_supported(config)


@pytest.mark.parametrize(
    "model_type",
    ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "gpt_neox"],
)
def test_plain_decoders_pass(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)
    check_supported(text_config(config))


def test_wrapper_for_images_is_refused() -> None:
    with pytest.raises(StartupError, match="'llava' wraps its text model"):
        text_config(AutoConfig.for_model("llava"))


def test_key_value_heads() -> None:
    assert num_kv_heads(transformers.LlamaConfig(num_attention_heads=8, num_key_value_heads=2)) == 2
    assert num_kv_heads(transformers.GPTNeoXConfig(num_attention_heads=8)) == 8
    falcon = transformers.FalconConfig(num_attention_heads=8, multi_query=True)
    assert num_kv_heads(falcon) == 1
    wide = transformers.FalconConfig(
        num_attention_heads=8, num_kv_heads=4, multi_query=True, new_decoder_architecture=True
    )
    assert num_kv_heads(wide) == 4


def test_head_dim_is_stated_or_follows_from_the_width() -> None:
    assert head_dim(transformers.Qwen3Config(hidden_size=64, num_attention_heads=4)) == 128
    assert head_dim(transformers.GPTNeoXConfig(hidden_size=64, num_attention_heads=4)) == 16


def test_windows_only_where_the_model_uses_them() -> None:
    mistral = transformers.MistralConfig(num_hidden_layers=2, sliding_window=8)
    assert sliding_windows(mistral) == (8, 8)
    qwen = transformers.Qwen2Config(
        num_hidden_layers=3, use_sliding_window=True, sliding_window=8, max_window_layers=1
    )
    assert sliding_windows(qwen) == (None, 8, 8)
    off = transformers.Qwen2Config(num_hidden_layers=2, use_sliding_window=False)
    assert sliding_windows(off) == (None, None)


def test_max_model_len() -> None:
    config = transformers.LlamaConfig(max_position_embeddings=100)
    assert max_model_len(config, None) == max_model_len(config, 100) == 100
    assert max_model_len(config, 7) == 7
    with pytest.raises(StartupError, match="101 exceeds the model's 100"):
        max_model_len(config, 101)
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert max_model_len(config, 101) == 101
