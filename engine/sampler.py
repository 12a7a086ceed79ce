"""The target's own token at every position that needs one, and the logprobs of what was drawn.

Each row is judged by itself: its logits, its parameters, its seed and its position decide, never
the batch. That makes a seeded answer the same alone, batched, preempted, restored or speculated.
The distribution is described in `engine.distribution`, the noise in `engine.noise`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.distribution import (
    FloatRow,
    PoisonedLogits,
    argmax,
    draw,
    log_normalizer,
    needs_processing,
    processed_logits,
    top_ids,
)
from engine.noise import uniform
from engine.outputs import Logprob, TokenLogprobs
from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row of logits and all that decides its token."""

    params: SamplingParams
    seed: int  # modulo 2**64
    position: int  # absolute index of the token being drawn
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # all before `position`, the drafts of this run included
    stop_ids: frozenset[int]  # cannot be drawn while there are fewer than min_tokens outputs


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token, with its logprobs if the row's parameters ask for them."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Unsampled:
    """No token can be drawn from this row; its request has to end with `error`."""

    error: str


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled | Unsampled]:
    """One result for each row of `logits` [rows, vocab], which are left as they are.

    A row whose logits are NaN or infinite is `Unsampled` and touches no other. Raises ValueError
    unless there is one SampleRow per row of logits.
    """
    if logits.ndim != 2 or len(rows) != logits.shape[0]:
        raise ValueError(f"{len(rows)} rows do not describe logits of shape {list(logits.shape)}")
    return [_sample_row(values, row) for values, row in zip(_on_host(logits), rows, strict=True)]


def prompt_logprobs(logits: Tensor, next_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Logprobs of the known tokens `next_ids` [n] after the positions of `logits` [n, vocab].

    `num_top` is the number of alternatives. Raises `PoisonedLogits` if any row is NaN or infinite.
    """
    if logits.ndim != 2 or len(next_ids) != logits.shape[0]:
        raise ValueError(f"{len(next_ids)} ids do not fit logits of shape {list(logits.shape)}")
    pairs = zip(_on_host(logits), next_ids, strict=True)
    return [_token_logprobs(values, token_id, num_top) for values, token_id in pairs]


def _on_host(logits: Tensor) -> FloatRow:
    host: FloatRow = logits.detach().to("cpu", torch.float32).numpy()
    return host


def _sample_row(logits: FloatRow, row: SampleRow) -> Sampled | Unsampled:
    params = row.params
    try:
        processed = logits
        if needs_processing(params, len(row.output_token_ids)):
            processed = processed_logits(
                logits, params, row.prompt_token_ids, row.output_token_ids, row.stop_ids
            )
        if params.greedy:
            token_id = argmax(processed)
        else:
            token_id = draw(processed, params, uniform(row.seed, row.position))
        if params.logprobs is None:
            return Sampled(token_id, None)
        return Sampled(token_id, _token_logprobs(logits, token_id, params.logprobs))
    except PoisonedLogits as error:
        return Unsampled(str(error))


def _token_logprobs(logits: FloatRow, token_id: int, num_top: int) -> TokenLogprobs:
    normalizer = log_normalizer(logits)
    top = []
    if num_top:
        ids = top_ids(logits, min(num_top, len(logits)))
        values = logits[ids]
        # Everything strictly larger comes earlier in the list, so a rank is a place in it.
        ranks = np.searchsorted(-values, -values, side="left") + 1
        for alternative, value, rank in zip(
            ids.tolist(), values.tolist(), ranks.tolist(), strict=True
        ):
            top.append(Logprob(alternative, value - normalizer, rank))
    value = logits[token_id]
    rank = int(np.count_nonzero(logits > value)) + 1
    return TokenLogprobs(token_id, float(value) - normalizer, rank, tuple(top))
