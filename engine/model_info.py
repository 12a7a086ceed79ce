"""What the planning half needs to know about the served model. Never imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ProgressFn = Callable[[str, float], None]  # phase, percent from 0 to 100


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Shapes and identity of a loaded model."""

    name: str  # as served
    path: str  # directory that the weights were read from
    architecture: str  # its class in transformers
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int  # width of the logits
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_heads: int
    dtype: str  # of weights and computation: bfloat16, float16 or float32
    eos_token_ids: tuple[int, ...]  # any of them ends a generation
    sliding_windows: tuple[int | None, ...]  # per layer, in tokens; None attends to everything
    fingerprint: bytes  # 32 bytes; equal only where equal tokens get equal KV
