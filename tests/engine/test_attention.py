from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from engine import attention
from engine.attention import NAME, PagedBatch, overwinter_paged_attention, register
from engine.kernels import Kernels
from engine.kv_cache import KVCache
from engine.kv_layout import KVLayout

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "Qwen3": {"head_dim": 24},
    "Mistral": {"sliding_window": 8},
    "Gemma2": {"head_dim": 16, "sliding_window": 8},
    "Gemma3Text": {"head_dim": 16, "sliding_window": 8, "layer_types": None},
    "Phi3": {"sliding_window": 8},
    "GPTNeoX": {"num_key_value_heads": 4},
}


def tiny(name: str, implementation: str) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SIZES | MODELS[name]))
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation, dtype=torch.float32
    )
    return model.eval()  # type: ignore[no-any-return]


def cache_for(model: Any, num_blocks: int) -> KVCache:
    config = model.config
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dtype = str(model.dtype).removeprefix("torch.")
    kv = KVCache(num_blocks, KVLayout(config.num_hidden_layers, heads, head_dim, 4, dtype))
    kv.pool.view(kv.dtype).fill_(float("nan"))
    return kv


class Sequences:
    """Feeds packed steps of several sequences to a model that runs on our attention."""

    def __init__(self, model: Any, tokens: list[list[int]], kernels: Kernels | None) -> None:
        self.model, self.tokens, self.kernels = model, tokens, kernels
        self.width = max(-(-len(each) // 4) for each in tokens)
        self.kv = cache_for(model, self.width * len(tokens))
        order = torch.randperm(self.kv.num_blocks, dtype=torch.int32)
        self.tables = order.view(len(tokens), self.width)
        self.computed = [0] * len(tokens)

    def step(self, rows: list[int]) -> list[torch.Tensor]:
        """Logits [rows, vocab] of each sequence for its next `rows` tokens."""
        ids: list[int] = []
        positions: list[int] = []
        for index, count in enumerate(rows):
            span = range(self.computed[index], self.computed[index] + count)
            ids += [self.tokens[index][p] for p in span]
            positions += span
            self.computed[index] += count
        owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))
        where = torch.tensor(positions)
        blocks = self.tables[owner, where // 4].long()
        batch = PagedBatch(
            torch.tensor([0, *rows]).cumsum(0).int(),
            torch.tensor(self.computed, dtype=torch.int32),
            self.tables,
            blocks * 4 + where % 4,
            self.kv,
            self.kernels,
        )
        with torch.no_grad():
            logits = self.model(
                input_ids=torch.tensor([ids]),
                position_ids=where[None],
                use_cache=False,
                paged=batch,
            ).logits
        return list(logits[0].split(rows))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("with_kernels", [True, False])
def test_models_compute_as_with_eager_attention(
    kernels: Kernels, name: str, with_kernels: bool
) -> None:
    """Three sequences, in packed chunks and single rows, against each alone in one eager pass."""
    register()
    model, eager = tiny(name, NAME), tiny(name, "eager")
    tokens = [torch.randint(1, 96, (n,)).tolist() for n in (23, 9, 17)]
    sequences = Sequences(model, tokens, kernels if with_kernels else None)
    steps = [sequences.step(rows) for rows in ([11, 1, 0], [1, 5, 16], [10, 2, 1], [1, 1, 0])]
    for index, ids in enumerate(tokens):
        with torch.no_grad():
            expected = eager(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        computed = torch.cat([step[index] for step in steps])
        torch.testing.assert_close(computed, expected, atol=1e-4, rtol=1e-4)


# -------------------------------------------------------------------- what the function refuses


class Layer(nn.Module):
    layer_idx = 0
    is_causal = True


def call(**changes: Any) -> torch.Tensor:
    kv = KVCache(2, KVLayout(1, 2, 8, 4, "float32"))
    paged = PagedBatch(
        torch.tensor([0, 3], dtype=torch.int32),
        torch.tensor([3], dtype=torch.int32),
        torch.tensor([[1]], dtype=torch.int32),
        torch.tensor([4, 5, 6]),
        kv,
    )
    arguments: dict[str, Any] = {
        "module": Layer(),
        "query": torch.ones(1, 4, 3, 8),
        "key": torch.ones(1, 2, 3, 8),
        "value": torch.ones(1, 2, 3, 8),
        "attention_mask": None,
        "scaling": 1.0,
        "paged": paged,
    }
    out, weights = overwinter_paged_attention(**(arguments | changes))
    assert weights is None
    return out


def test_the_output_has_rows_before_heads() -> None:
    assert torch.equal(call(), torch.ones(1, 3, 4, 8))


@pytest.mark.parametrize("name", ["s_aux", "head_mask", "alibi", "use_cache", "output_attentions"])
def test_an_argument_without_a_meaning_here_is_refused_by_name(name: str) -> None:
    with pytest.raises(TypeError, match=f"'{name}'"):
        call(**{name: True})


def test_arguments_that_are_off_or_spent_pass() -> None:
    off = dict.fromkeys(("use_cache", "output_attentions", "output_router_logits"), False)
    call(s_aux=None, position_ids=torch.arange(3), is_causal=True, **off)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_mask": torch.zeros(1)}, "attention_mask"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "causal"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"query": torch.ones(1, 4, 2, 8)}, "query"),
        ({"query": torch.ones(1, 3, 3, 8)}, "query"),
        ({"key": torch.ones(1, 4, 3, 8)}, "keys"),
        ({"value": torch.ones(1, 2, 3, 7)}, "values"),
    ],
)
def test_what_does_not_fit_is_a_value_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_a_module_that_is_not_causal_is_refused() -> None:
    module = Layer()
    module.is_causal = False
    with pytest.raises(ValueError, match="Layer is not"):
        call(module=module)


def test_another_dtype_than_the_pools_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"bfloat16.*float32"):
        call(query=torch.ones(1, 4, 3, 8, dtype=torch.bfloat16))


def test_the_mask_interface_builds_none() -> None:
    register()
    assert transformers.AttentionMaskInterface()[NAME] is attention._no_mask
    assert transformers.AttentionInterface()[NAME] is overwinter_paged_attention
    assert attention._no_mask(1, config=2) is None  # type: ignore[func-returns-value]
