"""A tiny model in a GGUF file of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, FEED_FORWARD, LAYERS = 32, 4, 2, 64, 2
TOKENS = ["<eos>", *(chr(letter) for letter in range(0x21, 0x7F)), "Ġ", "ab"]


def write_gguf(
    path: Path,
    architecture: str = "llama",
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    **extra: Any,
) -> Path:
    """A tiny llama in GGUF form: matrices in Q8_0, unless `kinds` has a type for the end of their
    name. `extra` adds tensors (a shape) or fields (a text)."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HIDDEN // HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * (len(TOKENS) - 1))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    for key, value in extra.items():
        if isinstance(value, str):
            writer.add_string(key.replace("__", "."), value)
    draw = np.random.default_rng(0)
    key_width = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for n in range(LAYERS):
        shapes |= {
            f"blk.{n}.attn_norm.weight": (HIDDEN,),
            f"blk.{n}.ffn_norm.weight": (HIDDEN,),
            f"blk.{n}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{n}.attn_k.weight": (key_width, HIDDEN),
            f"blk.{n}.attn_v.weight": (key_width, HIDDEN),
            f"blk.{n}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{n}.ffn_gate.weight": (FEED_FORWARD, HIDDEN),
            f"blk.{n}.ffn_up.weight": (FEED_FORWARD, HIDDEN),
            f"blk.{n}.ffn_down.weight": (HIDDEN, FEED_FORWARD),
        }
    shapes |= {
        key.replace("__", "."): value for key, value in extra.items() if isinstance(value, tuple)
    }
    for name, shape in shapes.items():
        data = draw.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, data)
            continue
        kind = gguf.GGMLQuantizationType.Q8_0
        for end, other in (kinds or {}).items():
            kind = other if name.endswith(end) else kind
        writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
