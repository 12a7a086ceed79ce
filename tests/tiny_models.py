"""Tiny random-weight model directories, one per family, equal for equal arguments.

The weights are drawn at unit gain (a transformers default initialisation at this width leaves
attention a millionth of the residual stream, and a poisoned KV slot would not show in the logits).
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.make_draft import write_draft

VOCAB_SIZE = 384
HIDDEN = 64
BOS, EOS, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIALS = (PAD, BOS, EOS)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CORPUS = (
    "The store keeps what the model has read, and the model reads what the store has kept. "
    "When the winter comes the bees overwinter in the hive, and in spring they fly again. "
    "A block is a run of tokens; a token is a run of bytes; a hash names the block and all before. "
    "Numbers such as 1, 23, 456 and 7890 are cut into digits. Questions end with a question mark? "
)

# What every family shares; each entry below names its config class and what differs.
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": SPECIALS.index(BOS),
    "eos_token_id": SPECIALS.index(EOS),
    "pad_token_id": SPECIALS.index(PAD),
    "tie_word_embeddings": False,
}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_FULL, _WINDOW = "full_attention", "sliding_attention"

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_ROPE, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {**_ROPE, "use_sliding_window": False}),
    "qwen3": ("Qwen3Config", _ROPE),
    "mistral": ("MistralConfig", {**_ROPE, "sliding_window": 24}),
    "gemma2": (
        "Gemma2Config",
        {
            **_ROPE,
            "layer_types": [_WINDOW, _FULL, _WINDOW],
            "sliding_window": 24,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {
            "layer_types": [_WINDOW, _WINDOW, _FULL],
            "sliding_window": 24,
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                _FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 1_000_000.0},
                _WINDOW: {"rope_type": "default", "rope_theta": 10000.0},
            },
            "tie_word_embeddings": True,
        },
    ),
    "phi3": ("Phi3Config", {**_ROPE, "original_max_position_embeddings": 2048}),
    "gpt_neox": ("GPTNeoXConfig", {"num_key_value_heads": None}),
}


def make_tiny_model(
    directory: Path, family: str = "llama", seed: int = 0, **overrides: Any
) -> Path:
    """Write config, float32 safetensors, tokenizer and generation config into `directory`.

    `overrides` replace fields of the config, and so may make a model that must be refused.
    Returns `directory`, which is created if it does not exist.
    """
    directory.mkdir(parents=True, exist_ok=True)
    class_name, differing = FAMILIES[family]
    fields = {k: v for k, v in {**_SHAPE, **differing, **overrides}.items() if v is not None}
    config = getattr(transformers, class_name)(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _draw_weights(model, seed)
    with _quiet():
        model.save_pretrained(directory)
    make_tiny_tokenizer(directory)
    return directory


def make_draft_model(target: Path, directory: Path, num_layers: int) -> Path:
    """Write the first layers of `target` into the new `directory`, which is returned: right now
    and then. One of all layers is always right; `make_tiny_model` of another seed nearly never."""
    return write_draft(target, directory, num_layers)


def make_tiny_tokenizer(directory: Path) -> None:
    """Write a byte-level BPE of `VOCAB_SIZE` tokens with digits cut singly and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": BOS,
                "eos_token": EOS,
                "pad_token": PAD,
                "chat_template": CHAT_TEMPLATE,
                "clean_up_tokenization_spaces": False,
            },
            indent=1,
        )
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of transformers in the test output."""
    was_enabled = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers.utils.logging.enable_progress_bar()


@torch.no_grad()
def _draw_weights(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Gemma multiplies its embedding by sqrt(hidden size); left alone, that residual would drown the
    # layers and every next token would be the last one again. The final norm gives back the gain.
    gain = math.sqrt(HIDDEN) if "Gemma" in type(model).__name__ else 1.0
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if "embed" in name or name == "lm_head.weight":
            parameter.copy_(noise * 0.25 / gain)
        elif parameter.ndim >= 2:
            parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
        elif name == "model.norm.weight":
            parameter.add_(gain - 1 + noise * 0.1)
        else:  # norms and biases keep their centre (1 or 0) but must not be blind to being lost
            parameter.add_(noise * 0.1)


def settle(weights: Path) -> None:
    """Wait until the digest of a weight file may be remembered; a change time cannot be set."""
    while time.time() - weights.stat().st_ctime <= 0.11:
        time.sleep(0.01)
