"""Before a model serves: the same tokens through our pages and through its own eager attention.

A model whose attention takes an argument we do not know, scales differently, or keeps KV in a way
that pages do not hold, shows here, at load, instead of in somebody's answer. So does a fused layer
that computes something else than the module it replaced: the reference is taken before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention import NAME
from engine.errors import StartupError
from engine.model_loader import LoadedModel
from engine.model_runner import ModelRunner
from engine.step import SequenceInput

NUM_TOKENS = 48
CHUNKS = (17, 1, 30)  # crosses block boundaries, mixes a chunk with a single row

# Largest difference of two logits as a share of the logits' own spread. float32: summation order
# alone; the 16-bit types round every activation, which 30 layers amplify to some percent.
TOLERANCE = {"float32": 1e-3, "bfloat16": 8e-2, "float16": 2e-2}


@dataclass(frozen=True, slots=True)
class Reference:
    """What a model made of some tokens as transformers has it."""

    token_ids: list[int]
    logits: torch.Tensor  # float32 [tokens, vocab]


def reference_of(loaded: LoadedModel) -> Reference:
    """To be taken while the model is as it was loaded. Raises `StartupError` where it cannot be."""
    info = loaded.info
    num_tokens = min(NUM_TOKENS, info.max_model_len)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, info.vocab_size, (num_tokens,), generator=generator).tolist()
    with _refusing(loaded):
        return Reference(token_ids, _eager_logits(loaded, token_ids))


def check_model(
    loaded: LoadedModel,
    runner: ModelRunner,
    reference: Reference,
    block_size: int,
    num_blocks: int,
) -> float:
    """Raises `StartupError` naming the architecture; returns the relative difference.

    Uses the pool's first blocks, so it runs before anything else does; a pool of fewer tokens than
    the reference has is tested with as many.
    """
    info = loaded.info
    num_tokens = min(len(reference.token_ids), num_blocks // len(runner.groups) * block_size)
    with _refusing(loaded):
        ours = _paged_logits(runner, reference.token_ids[:num_tokens], block_size)
    expected = reference.logits[:num_tokens]
    spread = (expected.max() - expected.min()).item() or 1.0
    difference = (ours - expected).abs().max().item() / spread
    if not difference <= TOLERANCE[info.dtype]:
        raise StartupError(
            f"model architecture {info.architecture} cannot be served: through KV pages its logits"
            f" differ from its own by {difference:.2g} of their spread (allowed:"
            f" {TOLERANCE[info.dtype]:.2g}); use another model"
        )
    return difference


@contextlib.contextmanager
def _refusing(loaded: LoadedModel) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        raise StartupError(
            f"model architecture {loaded.info.architecture} cannot be served: its attention does"
            f" not run through KV pages ({error}); use another model"
        ) from error


def _paged_logits(runner: ModelRunner, token_ids: list[int], block_size: int) -> torch.Tensor:
    num_blocks = -(-len(token_ids) // block_size)
    tables = [
        list(range(group.index * num_blocks, (group.index + 1) * num_blocks))
        for group in runner.groups
    ]
    collected = []
    start = 0
    for size in CHUNKS:
        chunk = token_ids[start : start + size]
        if not chunk:
            break
        packed = runner.pack([SequenceInput(chunk, start, tables)])
        every_row = torch.arange(len(chunk), device=packed.input_ids.device)
        collected.append(runner.logits(runner.with_logit_rows(packed, every_row)))
        start += size
    return torch.cat(collected)


@torch.inference_mode()
def _eager_logits(loaded: LoadedModel, token_ids: list[int]) -> torch.Tensor:
    model: Any = loaded.model  # transformers' methods are beyond nn.Module's types
    model.set_attn_implementation("eager")
    try:
        device = next(model.parameters()).device
        input_ids = torch.tensor([token_ids], device=device)
        positions = torch.arange(len(token_ids), device=device)[None]
        output = model(input_ids=input_ids, position_ids=positions, use_cache=False)
    finally:
        model.set_attn_implementation(NAME)
    logits: torch.Tensor = output.logits[0]
    return logits.float()
