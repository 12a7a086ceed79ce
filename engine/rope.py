"""Pins long-context RoPE, so that no request's positions depend on its neighbours' lengths.

transformers chooses the frequencies of its "dynamic" and "longrope" variants anew in each forward,
from the largest position in it. In a packed forward one long request would change the keys of all.
Here they are chosen once, for the longest request that may come, and are part of the fingerprint.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_PINNED = "pinned"  # a name that transformers' forward does not know, so it leaves them alone


def _changes_with_length(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"


@torch.no_grad()
def pin_rope(model: nn.Module, max_model_len: int) -> dict[str, Any]:
    """Fix the frequencies of every rotary embedding in `model` for `max_model_len` tokens.

    Returns what was chosen, for the fingerprint: `{}` for models whose frequencies never change.
    """
    chosen: dict[str, Any] = {}
    for name, module in model.named_modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str) and _changes_with_length(rope_type):
            chosen[name] = [rope_type, _pin(module, rope_type, None, max_model_len)]
            module.rope_type = _PINNED
        elif isinstance(rope_type, dict):
            for layer_type, variant in rope_type.items():
                if _changes_with_length(variant):
                    frequencies = _pin(module, variant, layer_type, max_model_len)
                    chosen[f"{name}.{layer_type}"] = [variant, frequencies]
                    rope_type[layer_type] = _PINNED
    return chosen


def _pin(
    module: Any, rope_type: str, layer_type: str | None, max_model_len: int
) -> list[list[float] | float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    prefix = "" if layer_type is None else f"{layer_type}_"
    buffer: torch.Tensor = getattr(module, f"{prefix}inv_freq")
    compute: Any = ROPE_INIT_FUNCTIONS[rope_type]
    frequencies, scaling = compute(
        module.config, buffer.device, seq_len=max_model_len, layer_type=layer_type
    )
    buffer.copy_(frequencies)
    setattr(module, f"{prefix}attention_scaling", scaling)
    return [frequencies.tolist(), float(scaling)]
