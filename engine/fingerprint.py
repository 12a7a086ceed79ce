"""The model's identity: equal fingerprints mean equal KV for equal tokens.

It is the root of every block hash, so whatever changes KV must be in it. The KV layout, the block
size and the format version are added where they are decided, by the engine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

# Raise when the meaning of a part below changes: nothing stored before is hit again.
VERSION = 1

# Fields of a config that say nothing about what a forward computes. Whatever is not listed counts:
# a needless miss costs a recomputation, a wrong hit would be a wrong answer.
_IRRELEVANT = frozenset(
    {
        "_name_or_path",
        "_model_name_or_path",
        "_commit_hash",
        "_from_model_config",
        "transformers_version",
        "architectures",
        "auto_map",
        "dtype",
        "torch_dtype",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "sep_token_id",
        "id2label",
        "label2id",
        "problem_type",
        "task_specific_params",
        "initializer_range",
        "attention_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "hidden_dropout",
        "classifier_dropout",
    }
)


def model_fingerprint(
    *,
    weight_digests: Sequence[str],
    architecture: str,
    config: Mapping[str, Any],
    rope: Mapping[str, Any],
    dtype: str,
    quantisation: str,
) -> bytes:
    """32 bytes over everything of the model that a key or value depends on.

    Args:
        weight_digests: content digests of the weight files, in the order of their names.
        architecture: the model's class.
        config: its configuration as served, overrides included.
        rope: what long-context RoPE was pinned to; empty where nothing was.
        dtype: compute dtype.
        quantisation: of the weights in memory; "none" where they are dense.
    """
    parts = {
        "version": VERSION,
        "weights": list(weight_digests),
        "architecture": architecture,
        "config": {key: value for key, value in config.items() if key not in _IRRELEVANT},
        "rope": dict(rope),
        "dtype": dtype,
        "quantisation": quantisation,
    }
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=repr)
    return hashlib.sha256(b"overwinter model\0" + text.encode()).digest()
